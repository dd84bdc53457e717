"""The actors' side of the buffer: which tickets are lent, and what becomes of what is put.

Decides only: time is an argument, the ledger remembers. Tickets that came back are lent before new ones (queue.py); a
new group is issued while admission, capacity and the disk allow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from asyncrl.buffer.ledger.group import Group, Reason, received, version_counts
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.buffer.staleness import admits, verdict
from asyncrl.buffer.tasks.drawing import Drawing
from asyncrl.buffer.tasks.sources import ticket_seed
from asyncrl.buffer.tickets.failures import FailureBudget
from asyncrl.buffer.tickets.leases import Key, Lease, Leases
from asyncrl.buffer.tickets.prefixes import Prefixes
from asyncrl.buffer.tickets.queue import FreeTickets
from asyncrl.data.base import TaskSource
from asyncrl.data.group_sizes import GroupSizes
from asyncrl.trajectory import Row, Ticket, TicketId, Trajectory
from asyncrl.wire import Frame

Put = Literal["stored", "duplicate", "late"]


class Tickets:
    def __init__(
        self, ledger: Ledger, rules: Rules, source: TaskSource, drawing: Drawing, leases: Leases, now: float
    ) -> None:
        self._ledger = ledger
        self._rules = rules
        self._drawing = drawing
        self._sizes = GroupSizes(source, rules.group_size)
        self._leases = leases
        self.prefixes = Prefixes(ledger.db)
        self._tasks: dict[int, Mapping[str, Any]] = {}
        self.free = FreeTickets(ledger, rules, leases, self._sizes.largest, now)
        self.failures = FailureBudget(rules.max_failures, rules.failure_window)
        self._filtered = ledger.filtered_while_filling()
        self._filling = len(ledger.history.line)
        self.starved = ledger.db.get("starved")
        """Set when filters used up their allowance under `on_starved: end`."""
        if self.starved and (self._may_filter or not rules.end_when_starved):  # resumed with other rules
            self._go_on()
        for number, index, attempt, actor, min_version in list(ledger.outstanding()):
            group = ledger.live.get(number)
            if group is not None and group.state == "in_flight" and group.stored[index] is None:
                leases.add(now, TicketId(group.branch, number, index), attempt, actor, min_version)
        for group in ledger.live.values():
            self.free.offer_all(group)

    # Lending

    def lend(self, now: float, actor: str, held: tuple[int, int], credits: int) -> tuple[list[Ticket], str]:
        """At most `credits` tickets; with fewer, why there are no more."""
        history = self._ledger.history
        if history.recorded_version >= self._rules.steps:
            return [], f"all {self._rules.steps} training steps are done"
        if history.published is None:
            return [], f"no weights are published on branch {history.branch} yet"
        least = (history.branch, history.published)
        if held < least:
            return [], f"{actor} holds weights {held}, {least} are needed"
        tickets: list[Ticket] = []
        why = ""
        while len(tickets) < credits:
            key = self.free.take(now, actor)
            if key is None:
                why = self._why_no_group()
                if why:
                    break
                self.free.offer_all(self._issue())
                continue
            tickets.append(self._ticket(now, key, actor, least))
        return tickets, why

    def _ticket(self, now: float, key: Key, actor: str, least: tuple[int, int]) -> Ticket:
        number, index = key
        group = self._ledger.live[number]
        prefix = self.prefixes.lend(key, self._ledger.history.version, self._rules.max_staleness)
        oldest = least[1] if prefix is None else min(prefix[1], least[1])
        attempt = self._ledger.lend(group, index, actor, oldest)
        id = TicketId(group.branch, number, index)
        self._leases.add(now, id, attempt, actor, oldest)
        seed = ticket_seed(self._rules.actors_seed, "train", group.branch, number, index, attempt)
        return Ticket(
            id,
            attempt,
            "train",
            self._task(group),
            least,
            group.size,
            0.0 if index == 0 and self._rules.greedy_first else self._rules.temperature,
            seed,
            self._rules.lease_s,
            prefix and prefix[0],
        )

    def _issue(self) -> Group:
        put_back = self._ledger.put_back()
        if put_back is None:
            draw = self._drawing.next()
            index, curriculum = draw.task, draw.curriculum
        else:
            index, curriculum = put_back.task, put_back.curriculum
        task = self._drawing.task(index)
        group = self._ledger.issue(self._sizes.of(index), str(task["id"]), index, curriculum, put_back)
        if put_back is None:
            self._drawing.made(draw)
        self._tasks[group.number] = task
        return group

    def _task(self, group: Group) -> Mapping[str, Any]:
        if group.number not in self._tasks:
            self._tasks[group.number] = self._drawing.task(group.task)
        return self._tasks[group.number]

    def _why_no_group(self) -> str:
        """Empty when a new group may be issued."""
        rules, ledger, history = self._rules, self._ledger, self._ledger.history
        if self.starved:
            return self.starved
        if self.failing:
            return self.failing
        in_flight, unused = ledger.count("in_flight"), ledger.count("waiting")
        if rules.max_uses > 1:
            unused -= sum(g.state == "waiting" and g.uses > 0 for g in ledger.live.values())
        recent = history.first_uses_since(history.published or 0)
        if not admits(in_flight, unused, recent, rules.max_staleness, rules.groups_per_step):
            return (
                f"admission: {in_flight} groups in flight, {unused} waiting and {recent} in batches since version "
                f"{history.published} was published reach (max_staleness + 1) * groups_per_step = "
                f"{(rules.max_staleness + 1) * rules.groups_per_step}"
            )
        if self.reserved() + self._sizes.largest > rules.capacity:
            return f"capacity: {self.reserved()} of {rules.capacity} trajectories are in flight or waiting"
        if ledger.db.payloads.disk_bytes >= rules.max_disk_bytes:
            return f"disk: the payloads reach buffer.max_disk_gb = {rules.max_disk_bytes / 1e9:g}"
        return ""

    @property
    def failing(self) -> str:
        """Why the run ends: too many episodes fail in their environment, and `env.on_failures` is stop."""
        return self.failures.exceeded if self._rules.stop_on_failures else ""

    def reserved(self) -> int:
        """Places taken: in trajectories, of groups that are in flight or may still be used after the open batch."""
        last = self._rules.max_uses - 1
        if last or self._sizes.smallest < self._sizes.largest:
            return sum(g.size for g in self._ledger.live.values() if g.state != "assigned" or g.uses < last)
        return (self._ledger.count("in_flight") + self._ledger.count("waiting")) * self._rules.group_size

    # What comes back

    def put(self, trajectory: Trajectory, digest: str, record: Frame) -> Put:
        """Raises Refused for a ticket that was never lent, and for a trajectory that nobody may train on."""
        id, group = trajectory.id, self._ledger.load(trajectory.id.group)
        if id.branch < self._ledger.history.branch and (group is None or group.branch != id.branch):
            self._ledger.bump("late")  # of a part of history that went down with its host
            return "late"
        if group is None or group.branch != id.branch or id.index >= group.size:
            raise Refused("unknown_ticket", f"ticket {id} was never issued")
        if trajectory.attempt >= group.attempts[id.index]:
            raise Refused("unknown_ticket", f"attempt {trajectory.attempt} at ticket {id} was never lent")
        if trajectory.task_id != group.task_id:
            raise Refused("bad_trajectory", f"ticket {id} is for task {group.task_id!r}, not {trajectory.task_id!r}")
        if trajectory.stop_reason == "aborted":
            raise Refused("bad_trajectory", f"the episode of ticket {id} was aborted: use fail or release")
        stored = group.stored[id.index]
        if stored is not None and stored.digest == digest:
            self._ledger.bump("duplicate")
            return "duplicate"
        if stored is not None or group.state != "in_flight":
            if stored is None or stored.attempt != trajectory.attempt:
                self._ledger.end_attempt(id.group, id.index, trajectory.attempt, "late")
            self._ledger.bump("late")
            return "late"
        versions = version_counts(trajectory)
        if versions[-1][0] > self._ledger.history.recorded_version + 1:
            raise Refused(
                "bad_trajectory",
                f"ticket {id} has a token of version {versions[-1][0]}; the learner has reached "
                f"{self._ledger.history.recorded_version}",
            )
        lease = self._leases.remove(id.group, id.index)
        if lease is not None and lease.attempt != trajectory.attempt:
            self._ledger.end_attempt(id.group, id.index, lease.attempt, "revoked")
        self.failures.note("")
        location = self._ledger.db.payloads.append(record)
        self.prefixes.stored(trajectory)
        self._ledger.receive(group, id.index, received(trajectory, versions, digest, location))
        self._judge(group)
        return "stored"

    def _judge(self, group: Group) -> None:
        """What a group's new trajectory decides: its age, and once it is complete the filters."""
        if group.complete:
            self._tasks.pop(group.number, None)
        if self._over_age(group):
            self.drop(group, "stale", self._rules.requeue)
        elif group.state == "waiting" and any(refuses(group) for refuses in self._rules.filters):
            if self._filling != len(self._ledger.history.line):
                self._filling, self._filtered = len(self._ledger.history.line), 0
            if self._may_filter:
                self._filtered += 1
                self.drop(group, "filtered")
            elif self._rules.end_when_starved:
                self.starved = (
                    f"solved: filters dropped {self._filtered} groups while batch {self._filling} was filled "
                    "(buffer.filter_max_ratio), and buffer.on_starved is end"
                )
                self._ledger.db.set("starved", self.starved)
            else:
                self._ledger.unweight(group)

    def _go_on(self) -> None:
        self.starved = None
        self._ledger.db.unset("starved")

    @property
    def _may_filter(self) -> bool:
        return self._filtered < self._rules.filter_max_ratio * self._rules.groups_per_step

    def sweep(self) -> None:
        """Drops what no batch can hold any more, now that the version has grown."""
        for group in list(self._ledger.live.values()):
            if group.state != "assigned" and self._over_age(group):
                self.drop(group, "stale", self._rules.requeue)

    def _over_age(self, group: Group) -> bool:
        rules = self._rules
        version = self._ledger.history.version
        return verdict(group, version, rules.max_staleness, rules.over_age, rules.mask_min_kept) == "over_age"

    def drop(self, group: Group, reason: Reason, put_back: bool = False) -> None:
        """Ends a group that is in flight or waiting; one that was trained on before ends as trained."""
        for lease in self._leases.of_group(group.number):
            self._end(lease, "revoked")
        self._tasks.pop(group.number, None)
        self.prefixes.drop(group.number, group.size)
        if group.uses:
            self._ledger.retire(group)
        else:
            self._ledger.drop(group, reason, put_back)

    def fail(self, id: TicketId, attempt: int, reason: str, detail: str) -> None:
        """The environment failed: tried again within `env.retries`, then the group is dropped."""
        lease = self._leases.get(id.group, id.index)
        if lease is None or (lease.id, lease.attempt) != (id, attempt):
            return  # it lapsed before, or this is a repeat
        self._end(lease, "failed", f"{reason}: {detail}"[:2000])
        self.failures.note(f"{reason}: {detail}")
        self.prefixes.end((id.group, id.index), "failed")
        group = self._ledger.live[id.group]
        if group.failures[id.index] > self._rules.env_retries:
            self.drop(group, "env_error")
        else:
            self._again((id.group, id.index))

    def give_back(self, lease: Lease, how: str) -> None:
        """released, lapsed or revoked: the ticket is lent again."""
        self._end(lease, how)
        self._again((lease.id.group, lease.id.index))

    def _again(self, key: Key) -> None:
        """The ticket is lent again. One whose group was compared without it, and stored in part, cannot be: its actor
        was lost between two puts, and the prompt is drawn again."""
        group = self._ledger.live.get(key[0])
        if self._rules.together and group is not None and group.state == "in_flight" and group.trajectories:
            self.drop(group, "env_error", put_back=True)
        else:
            self.free.offer(key)

    def hand_back(self, lease: Lease, prefix: Row) -> None:
        """The ticket is lent again with what its attempt has sampled."""
        self.prefixes.keep((lease.id.group, lease.id.index), lease.attempt, prefix)
        self.give_back(lease, "handed_back")

    def check_prefix(self, prefix: Row) -> None:
        """Raises Refused for one that nobody can have sampled by now."""
        newest, reached = int(prefix.versions.max()), self._ledger.history.recorded_version
        if newest > reached + 1:
            raise Refused(
                "bad_trajectory", f"a prefix has a token of version {newest}; the learner has reached {reached}"
            )

    def forked(self) -> None:
        """Leases and prefixes of groups that the fork ended are void, and so is what filters did since then."""
        self._filtered, self._filling = 0, len(self._ledger.history.line)
        self._go_on()
        for lease in self._leases:
            if not lease.eval and lease.id.group not in self._ledger.live:
                self._end(lease, "revoked")
        for number in self.prefixes.groups() - self._ledger.live.keys():
            self.prefixes.drop(number, self._sizes.largest)

    def _end(self, lease: Lease, how: str, detail: str | None = None) -> None:
        self._leases.remove(lease.id.group, lease.id.index)
        self._ledger.end_attempt(lease.id.group, lease.id.index, lease.attempt, how, detail)
