"""Tickets: which are issued to whom, and what becomes of what comes back.

Decides only: time is an argument, the ledger remembers. Tickets that came back are issued before new ones (queue.py);
a new group is issued while admission, capacity and the disk allow it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from asyncrl.buffer.client.messages import PutOutcome
from asyncrl.buffer.ledger.attempts import leased, outstanding
from asyncrl.buffer.ledger.group import Group, Reason, Received, version_counts
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.replays import retire
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.buffer.staleness import admits, verdict
from asyncrl.buffer.tasks.drawing import Draw, TaskDraws
from asyncrl.buffer.tasks.sources import ticket_seed
from asyncrl.buffer.tickets.carried import Carried
from asyncrl.buffer.tickets.failures import Failures
from asyncrl.buffer.tickets.filtering import Filtering
from asyncrl.buffer.tickets.leases import ActiveLease, Leases, TicketKey
from asyncrl.buffer.tickets.places import Places
from asyncrl.buffer.tickets.queue import IssueQueue
from asyncrl.buffer.tickets.validity import Validity
from asyncrl.data.base import TaskSource
from asyncrl.data.group_sizes import GroupSizes
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from asyncrl.wire import Frame


class Tickets:
    def __init__(
        self, ledger: Ledger, rules: Rules, source: TaskSource, draws: TaskDraws, leases: Leases, now: float
    ) -> None:
        self._ledger, self._rules, self._draws, self._leases = ledger, rules, draws, leases
        self._sizes = GroupSizes(source, rules.group_size)
        self.places = Places(ledger, rules, self._sizes)
        self.validity = Validity(ledger, leases)
        self.carried = Carried(ledger.db, rules)
        self.queue = IssueQueue(ledger, rules, leases, self.carried, self._sizes.largest, now)
        self.bound = self.queue.bound
        self.failures = Failures(rules)
        self.filtering = Filtering(ledger, rules)
        self._missing_since: dict[int, float] = {}
        """When the learner began to wait for a group, by number."""
        for lent in outstanding(ledger.db, ledger.live):
            leases.add(now, *lent)
        for group in ledger.live.values():
            self.queue.add_group(group)

    # Going out

    def issue(self, now: float, actor: str, held: tuple[int, int], credits: int) -> tuple[list[Ticket], str]:
        """At most `credits` tickets; with fewer, why there are no more; empty where they carry as much as fits."""
        history = self._ledger.history
        if history.recorded_version >= self._rules.steps:
            return [], f"all {self._rules.steps} training steps are done"
        if history.published is None:
            return [], f"no weights are published on branch {history.branch} yet"
        least = (history.branch, history.published)
        if held < least:
            return [], f"{actor} holds weights {held}, {least} are needed"
        tickets: list[Ticket] = []
        while len(tickets) < credits and not self.carried.fills(tickets):
            if (key := self.queue.pop(now, actor)) is not None:
                tickets.append(self._start_attempt(now, key, actor, least))
            elif why := self._why_no_group():
                return tickets, why
            else:
                self.queue.add_group(self._issue_group())
        return tickets, ""

    def _start_attempt(self, now: float, key: TicketKey, actor: str, least: tuple[int, int]) -> Ticket:
        number, index = key
        group = self._ledger.live[number]
        begun = self.carried.for_attempt(key, self._ledger.history.version, least[1], self.bound.holds)
        attempt = self._ledger.start_attempt(group, index, actor, begun.oldest)
        id = TicketId(least[0], number, index)
        self._leases.add(now, id, attempt, actor, begun.oldest)
        seed = ticket_seed(self._rules.actors_seed, "train", least[0], number, index, attempt)
        temperature = 0.0 if index == 0 and self._rules.greedy_first else self._rules.temperature
        task, lease_s, carried = self._draws.task(group.task), self._rules.lease_s, (group.durable, begun.turns)
        sampling = (temperature, seed, lease_s, "")
        return Ticket(id, attempt, "train", task, least, group.size, *sampling, *carried)

    def _issue_group(self) -> Group:
        put_back = self._ledger.put_back()
        draw = self._draws.next() if put_back is None else Draw(put_back.draw, put_back.task, put_back.curriculum)
        task = self._draws.task(draw.task)
        about = str(task["id"]), draw.task, draw.curriculum, put_back, self._rules.env_of(task)
        group = self._ledger.issue(self._sizes.of(draw.task), *about)
        self.carried.begin(group)
        if put_back is None:
            self._draws.issued(draw)
        return group

    def _why_no_group(self) -> str:
        """Empty when a new group may be issued."""
        rules, ledger, history = self._rules, self._ledger, self._ledger.history
        if ended := self.filtering.starved or self.failures.verdict:
            return ended
        in_flight, unused = ledger.account.count("in_flight"), ledger.account.count("waiting")
        if rules.max_uses > 1:
            unused -= sum(g.state == "waiting" and g.uses > 0 for g in ledger.live.values())
        recent = history.first_uses_since(history.published or 0)
        if not admits(in_flight, unused, recent, self.bound.admits, rules.groups_per_step):
            return (
                f"admission: {in_flight} groups in flight, {unused} waiting and {recent} in batches since version "
                f"{history.published} was published reach (max_staleness + 1) * groups_per_step = "
                f"{(self.bound.admits + 1) * rules.groups_per_step}"
            )
        return self.places.why_full()

    # Coming back

    def receive(self, trajectory: Trajectory, digest: str, record: Frame) -> PutOutcome:
        """Raises Refused for a ticket that was never issued, for one of another actor, and for a trajectory that nobody
        may train on. The actor's own attempt then ends, and its ticket is issued again within `env.retries`."""
        try:
            outcome = self._receive(trajectory, digest, record)
        except Refused as refused:
            id, attempt = trajectory.id, trajectory.attempt
            lease = self._leases.get(id.group, id.index)
            if lease is not None and lease.is_of((id, attempt), trajectory.actor):
                self.fail(id, attempt, refused.code, str(refused))
            raise
        if outcome != "stored":
            self._ledger.bump(outcome)
        return outcome

    def _receive(self, trajectory: Trajectory, digest: str, record: Frame) -> PutOutcome:
        id, group = trajectory.id, self._ledger.load(trajectory.id.group)
        if id.branch < self._ledger.history.branch and leased(self._ledger.db, id, trajectory.attempt) is None:
            return "late"  # this part of history was lost with its host
        group = self.validity.group_of(trajectory, group)
        return self._late_or_duplicate(trajectory, digest, group) or self._store(trajectory, digest, record, group)

    def _late_or_duplicate(self, trajectory: Trajectory, digest: str, group: Group) -> PutOutcome | None:
        """None: the first trajectory of its ticket, and its group can use it."""
        id, stored = trajectory.id, group.stored[trajectory.id.index]
        if stored is not None and stored.digest == digest:
            return "duplicate"
        if stored is None and group.state == "in_flight" and id.branch == self._ledger.history.branch:
            return None
        if stored is None or stored.attempt != trajectory.attempt:
            self._ledger.end_attempt(id.group, id.index, trajectory.attempt, "late")
        return "late"

    def _store(self, trajectory: Trajectory, digest: str, record: Frame, group: Group) -> Literal["stored"]:
        id, versions = trajectory.id, version_counts(trajectory)
        self.validity.check_versions(trajectory, versions)
        lease = self._leases.remove(id.group, id.index)
        if lease is not None and lease.attempt != trajectory.attempt:
            self._ledger.end_attempt(id.group, id.index, lease.attempt, "revoked")
        self.failures.budget.note("")
        location = self._ledger.db.payloads.append(record)
        self.carried.received(trajectory, group)
        self._ledger.record_trajectory(group, id.index, Received.of(trajectory, versions, digest, location))
        self._judge(group)
        return "stored"

    def _judge(self, group: Group) -> None:
        """Drops a group with a new trajectory if it is too old, or once it is complete if a filter rejects it."""
        if self._over_age(group):
            self.drop(group, "stale", self._rules.requeue)
        elif group.state == "waiting" and self.filtering.drops(group):
            self.drop(group, "filtered")

    def sweep(self) -> None:
        """Drops the groups that became too old for any batch when the version grew."""
        for group in list(self._ledger.live.values()):
            if group.state != "assigned" and self._over_age(group):
                self.drop(group, "stale", self._rules.requeue)
        self.places.make_room()

    def extend(self, seconds: float) -> None:
        """Gives every group that a batch waits for so much more time."""
        self._missing_since = {number: since + seconds for number, since in self._missing_since.items()}

    def missing(self, now: float, version: int, usable: Callable[[Group], bool]) -> list[Group]:
        """Groups that the batch for `version` must hold and that are not usable yet. One that was awaited for
        `buffer.wait_s` is dropped instead."""
        missing = [group for group in self.queue.due(version) if not usable(group)]
        self._missing_since = {group.number: self._missing_since.get(group.number, now) for group in missing}
        overdue = [g for g in missing if now >= self._missing_since[g.number] + self._rules.wait_s]
        for group in overdue:
            self.drop(group, "wait_deadline", self._rules.requeue)
        return [group for group in missing if group not in overdue]

    def _over_age(self, group: Group) -> bool:
        rules, version = self._rules, self._ledger.history.version
        return verdict(group, version, self.bound.holds, rules.over_age, rules.mask_min_kept) == "over_age"

    def drop(self, group: Group, reason: Reason, put_back: bool = False) -> None:
        """Ends a group that is in flight or waiting; one that was trained on before ends as trained."""
        for lease in self._leases.of_group(group.number):
            self._end(lease, "revoked")
        self.carried.drop(group.number, group.size)
        if group.uses:
            retire(self._ledger, group, "stale")
        else:
            self._ledger.drop(group, reason, put_back)

    def fail(self, id: TicketId, attempt: int, reason: str, detail: str) -> bool:
        """The environment failed: the ticket is issued again within `env.retries`, then the group is dropped. Returns
        whether this ended an attempt."""
        lease = self._leases.get(id.group, id.index)
        if lease is None or (lease.id, lease.attempt) != (id, attempt):
            return False  # the lease lapsed before, or this is a repeat
        self._end(lease, "failed", f"{reason}: {detail}"[:2000])
        self.failures.budget.note(f"{reason}: {detail}")
        self.carried.failed((id.group, id.index), reason)
        group = self._ledger.live[id.group]
        if group.failures[id.index] > self._rules.env_retries:
            self.drop(group, "env_error")
        else:
            self._requeue(lease.key)
        return True

    def release(self, lease: ActiveLease, how: str) -> None:
        """How: released, lapsed or revoked. The ticket is issued again, with what its attempts have recorded."""
        self._end(lease, how)
        self._requeue(lease.key)

    def _requeue(self, key: TicketKey) -> None:
        """Issues the ticket again, unless its group was scored without it and stored in part: then its actor was lost
        between two puts, and the prompt is drawn again."""
        group = self._ledger.live.get(key[0])
        if self._rules.group_scored and group is not None and group.state == "in_flight" and group.trajectories:
            self.drop(group, "env_error", put_back=True)
        else:
            self.queue.add(key)

    def forked(self, version: int) -> None:
        """A branch has begun at `version`. Attempts lent before are void. Unless the fork dropped their group,
        tickets are issued again, with what the branch could have produced of what they carry."""
        self.filtering.forked()
        self.carried.forked(version, self._ledger.live, self._sizes.largest)
        for lease in self._leases:
            if not lease.eval and self._leases.get(*lease.key) is lease:
                self._end(lease, "revoked")
                self._requeue(lease.key)

    def _end(self, lease: ActiveLease, how: str, detail: str | None = None) -> None:
        self._leases.remove(lease.id.group, lease.id.index)
        self._ledger.end_attempt(lease.id.group, lease.id.index, lease.attempt, how, detail)
        self.carried.ended(lease.key, lease.attempt, self._ledger.load(lease.id.group))
