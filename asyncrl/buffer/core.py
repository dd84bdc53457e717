"""The buffer without sockets: its decision on every request, with time as an argument.

    tickets/              which tickets are issued (queue.py: in what order), what becomes of a trajectory
    batches/              which groups make batch b, what its outcome means, which rank gets which of them
    scoring/              which scorer has which group, what becomes of its scores
    evaluations/          the evaluation sets
    retention.py          which payloads stay
    checkpoint_writer.py  the buffer's part of a checkpoint
    ledger/               what is remembered, durable with `commit`

No answer of a method may leave the process before `commit` has returned. A crash loses what was not committed: opening
the folder again continues from the last commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.buffer.batches.batches import BatchAnswer, Batches
from asyncrl.buffer.batches.disk_losses import DiskLosses
from asyncrl.buffer.batches.shares import Shares
from asyncrl.buffer.bounds.idle_slots import IdleSlots
from asyncrl.buffer.checkpoint_writer import CheckpointWriter
from asyncrl.buffer.client.messages import (
    EvalReply,
    Outcome,
    PutOutcome,
    ScoreOutcome,
    ScoringReply,
    Start,
    Told,
    TurnOutcome,
)
from asyncrl.buffer.evaluations.places import FIRST_NUMBER
from asyncrl.buffer.evaluations.sets import EvalSets
from asyncrl.buffer.evaluations.stops import Stops
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.records import Batch, furthest
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.limits import Limits
from asyncrl.buffer.retention import Retention
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.buffer.scoring.scoring import Scoring
from asyncrl.buffer.staleness import staleness
from asyncrl.buffer.tasks.demonstrations import DemonstrationDraws
from asyncrl.buffer.tasks.drawing import TaskDraws
from asyncrl.buffer.tickets.leases import ActiveLease, Leases
from asyncrl.buffer.tickets.recording import Recording
from asyncrl.buffer.tickets.tickets import Tickets
from asyncrl.data.added_tasks import OnStepEnd
from asyncrl.data.base import Curriculum, TaskSource
from asyncrl.data.curricula import InOrder
from asyncrl.data.demonstrations import Demonstrations
from asyncrl.tracking.rollouts.held_out import Answers
from asyncrl.trajectory import Lease, LogHead, Ticket, TicketId, Trajectory
from asyncrl.user_errors import Cause
from asyncrl.wire import Frame
from asyncrl.wire.teacher_scores import GroupScores
from asyncrl.wire.turns import StoredTurn

STOOD_STILL_S = 1.0
"""Seconds of lateness from which the buffer counts as having stood still; a busy machine is late by less."""


class Buffer:
    def __init__(  # noqa: PLR0913 - what a run may have beside its tasks
        self,
        database: Database,
        rules: Rules,
        source: TaskSource,
        now: float,
        curriculum: Curriculum | None = None,
        on_step_end: OnStepEnd | None = None,
        held_out: Mapping[str, TaskSource] | None = None,
        answers: Answers | None = None,
        demonstrations: Demonstrations | None = None,
        checkpoints: Path | None = None,
    ) -> None:
        """`curriculum` orders the tasks, by default as the source does; `on_step_end` adds tasks. `held_out`: the
        sources of those held-out sets that have one of their own. `answers` keeps some of their episodes.
        `checkpoints`: their folder, where the numbers of branches are noted; None: nowhere."""
        self.database = database
        self.rules = rules
        self.ledger = Ledger(database, checkpoints)
        self._retention = Retention(self.ledger, rules)
        self._checkpoints = CheckpointWriter(self.ledger, self._retention)
        self.losses = DiskLosses(self.ledger)
        self.lost_to_disk = self.losses.again
        """Trajectories whose bytes were gone at opening, to be generated again once a learner has started."""
        self._retention.sweep()
        self.leases = Leases(rules.lease_s)
        draws = TaskDraws(self.ledger, source, curriculum or InOrder(), on_step_end)
        self.tickets = Tickets(self.ledger, rules, source, draws, self.leases, now)
        self.scoring = Scoring(self.ledger, rules, self.tickets.queue, now)
        kept = self.tickets.validity, self.tickets.carried.turns
        self._recording = Recording(self.ledger, self.leases, *kept)
        stops = Stops(database, rules)
        self.demonstrations = DemonstrationDraws(database, demonstrations, rules.demonstrations_per_step)
        parts = (self.ledger, rules, self.tickets, draws, self.losses, stops, self.demonstrations, self.scoring)
        self.batches = Batches(*parts)
        self._shares = Shares(self.ledger, self.scoring)
        sources = {each.name: source for each in rules.eval_sets} | dict(held_out or {})
        self.evals = EvalSets(database, rules, sources, self.leases, stops, self._made(), answers)
        self.limits = Limits.of(rules, furthest(database), self.evals.total)
        self.stopping = False
        self.actor_weights: dict[str, tuple[int, int]] = {}
        """Branch and version of each actor's weights when it last asked for tickets."""
        self._idle = IdleSlots(now)
        self._logs: dict[str, LogHead] = {}

    def commit(self, now: float) -> None:
        """Everything decided so far is durable. Raises LedgerFailed, and the process must end."""
        self._checkpoints.commit(now)

    def tick(self, now: float, late: float = 0.0) -> None:
        """Ends the leases that were not renewed in time, and judges the attempts that failed.

        `late`: seconds since this call was due. While the buffer stood still (a hung disk, a paused host) it could not
        hear a renewal, so every term grows by as much.
        """
        if late > STOOD_STILL_S:
            self.leases.extend(late)
            self.scoring.extend(late)
            self.tickets.extend(late)
        self.tickets.failures.all_fail.look(now)
        for lease in self.leases.expired(now):
            self._release(lease, "lapsed")
        self.scoring.tick(now)

    # Actors

    def joined(self, actor: str) -> None:
        """A new process under this name: the tickets of its predecessor are issued again."""
        self.actor_weights.pop(actor, None)
        self.evals.players.left(actor)
        for lease in self.leases:
            if lease.actor == actor:
                self._release(lease, "lapsed")

    def issue(self, now: float, actor: str, held: tuple[int, int], credits: int) -> tuple[list[Ticket], str]:
        """At most `credits` tickets for an actor with weights `held`; with fewer, why there are no more."""
        left = self.tickets.bound.slots.left(actor)
        allowed = credits if left is None else min(credits, left)
        slots = self.leases.of[actor] + allowed
        tickets, why = self._issue(now, actor, held, allowed)
        leased, refused = self.leases.of[actor], why.startswith("admission")
        if allowed < credits and not why:
            why = f"{actor} holds {leased} tickets, as many as it may (launch.tuning)"
        self._idle.asked(now, actor, slots=slots, leased=leased, refused=refused)
        return tickets, why

    def _issue(self, now: float, actor: str, held: tuple[int, int], credits: int) -> tuple[list[Ticket], str]:
        if held > self._made() and not self.batches.not_begun:
            return [], f"{actor} holds weights {held}, and the learner has made none beyond {self._made()}"
        self.actor_weights[actor] = held
        if self.stopping:
            return [], "the run is stopping"
        if self.batches.not_begun:
            return [], f"{self.batches.not_begun}, and the learner has not started on it"
        if self.evals.plays(now, actor):
            failing = self.tickets.failures.verdict
            return ([], failing) if failing else self.evals.issue(now, actor, held, credits)
        if self.evals.everyone or self.evals.players.is_reserved(actor):
            return [], f"no evaluation is open, and {actor} plays nothing else (actors.eval)"
        return self.tickets.issue(now, actor, held, credits)

    def hold(self, now: float, actor: str, held: tuple[int, int]) -> tuple[int, int] | None:
        """The weights that an actor is to hold, if not the newest: those to which its evaluation is pinned. A reserved
        actor without one keeps what it has."""
        if self.evals.plays(now, actor):
            return self.evals.pinned
        return held if self.evals.players.is_reserved(actor) and held >= (0, 0) else None

    def prospect(self, now: float, actor: str, held: tuple[int, int]) -> str:
        """What an actor with weights `held` can get now: if one gets no ticket, no other of this kind does.

        There are few kinds, whatever the actors say that they hold.
        """
        history = self.ledger.history
        if held > self._made():
            return "not made"
        if self.evals.plays(now, actor):
            return "pinned" if held == self.evals.pinned else "to be pinned"
        if self.evals.players.is_reserved(actor):
            return "reserved"
        return "published" if held >= (history.branch, history.published or 0) else "old"

    def _made(self) -> tuple[int, int]:
        """Branch and version of the newest weights that can exist."""
        return self.ledger.history.branch, self.ledger.history.recorded_version

    def renew(self, now: float, actor: str, leases: Sequence[Lease]) -> list[Lease]:
        """Returns the leases that this actor no longer holds."""
        self.evals.players.heard(now, actor)
        return self.leases.renew(now, actor, leases)

    def logged(self, actor: str, head: LogHead) -> None:
        """The log of an actor has reached this line."""
        if self._logs.get(actor) != head:
            self._logs[actor] = head
            self.database.write("INSERT OR REPLACE INTO logs VALUES (?, ?, ?)", (actor, head.line, head.digest))

    def accept(self, trajectory: Trajectory, record: Frame) -> PutOutcome:
        """The first valid put of (branch, group, index) wins. Raises Refused."""
        digest = trajectory.digest()
        is_eval = trajectory.id.group >= FIRST_NUMBER
        if is_eval != (trajectory.kind == "eval"):
            raise Refused("bad_trajectory", f"ticket {trajectory.id} is not of kind {trajectory.kind}")
        if self.batches.not_begun:  # it belongs to the history that is lost
            self.ledger.bump("late")
            return "late"
        if is_eval:
            self.tickets.validity.check_actor(trajectory.id, trajectory.attempt, trajectory.actor, "put")
            outcome = self.evals.receive(trajectory, digest, record)
        else:
            outcome = self.tickets.receive(trajectory, digest, record)
        self.tickets.failures.all_fail.succeeded()
        return outcome

    def record_turn(self, actor: str, id: TicketId, attempt: int, turn: StoredTurn) -> TurnOutcome:
        """Keeps a recorded turn with its ticket. Raises Refused."""
        return "revoked" if self.batches.not_begun else self._recording.record(actor, id, attempt, turn)

    def fail(
        self, actor: str, id: TicketId, attempt: int, reason: str, detail: str, cause: Cause | None = None
    ) -> None:
        """The environment of an attempt failed. Raises Refused for an attempt of another actor."""
        if self.batches.not_begun:
            return
        self.tickets.validity.check_actor(id, attempt, actor, "fail")
        if id.group >= FIRST_NUMBER:
            ended = self.evals.fail(id, attempt, f"{reason}: {detail}")
        else:
            ended = self.tickets.fail(id, attempt, reason, detail)
        if ended:
            self.tickets.failures.all_fail.failed(cause, detail)

    def release(self, actor: str, leases: Sequence[Lease]) -> None:
        """The actor gives tickets back. Raises Refused, and releases none, for a ticket of another actor."""
        for id, attempt in leases:
            self.tickets.validity.check_actor(id, attempt, actor, "release")
        for lease in leases:
            active = self.leases.get(lease[0].group, lease[0].index)
            if active is not None and active.is_of(lease, actor):
                self._release(active, "released")

    def _release(self, lease: ActiveLease, how: str) -> None:
        if lease.eval:
            self.evals.release(lease)
        else:
            self.tickets.release(lease, how)

    # Scorers

    def issue_groups(self, now: float, scorer: str, credits: int) -> ScoringReply:
        """At most `credits` complete groups for a scorer; with fewer, why there are no more. Raises Refused."""
        if self.stopping or self.batches.not_begun:
            return ScoringReply((), self.batches.not_begun or "the run is stopping")
        return self.scoring.issue(now, scorer, credits)

    def records_of(self, number: int) -> list[Frame]:
        """The stored trajectories of a group, by index. Raises PayloadLost."""
        group = self.ledger.load(number)
        return [self.database.payloads.read(r.location) for r in group.trajectories] if group else []

    def accept_scores(self, scores: GroupScores, record: Frame) -> ScoreOutcome:
        """The first valid scores of a group win. Raises Refused."""
        return "late" if self.batches.not_begun else self.scoring.accept(scores, record)

    # The learner

    def start(self, b: int, version: int, branch: int | None, fresh: bool = False, caused: bool = False) -> Start:
        return self.batches.start(b, version, branch, fresh, caused)

    def batch(self, now: float, incarnation: int, b: int) -> BatchAnswer:
        return self.batches.batch(now, incarnation, b)

    def share(self, answer: BatchAnswer, dp_rank: int, dp_size: int) -> list[tuple[Frame, str, float]]:
        """(record, digest, weight) of each trajectory in one rank's share, group by group. Raises PayloadLost."""
        return self._shares.trajectories(answer, dp_rank, dp_size)

    def scores(self, answer: BatchAnswer, dp_rank: int, dp_size: int) -> list[tuple[Frame, str]]:
        """(record, digest) of the scores of each group in one rank's share. Raises PayloadLost."""
        return self._shares.scores(answer, dp_rank, dp_size)

    def mask_before(self, batch: Batch) -> int | None:
        """Under `mask`: tokens of an older version than this carry no loss in the batch."""
        return max(0, batch.version - batch.bound) if self.rules.over_age == "mask" else None

    @property
    def checkpoint_wanted(self) -> bool:
        return self._retention.checkpoint_wanted

    def finished(
        self, incarnation: int, b: int, outcome: Outcome, told: Told | None = None, now: float | None = None
    ) -> int:
        """`told`: what the learner measured of the batch; `now`: without it no slot counts as idle."""
        idle = 0.0 if now is None else self._idle.share(now, self.leases.of)
        return self.batches.finished(incarnation, b, outcome, told, idle)

    def published(self, incarnation: int, branch: int, version: int, digest: str) -> int:
        now_on = self.batches.published(incarnation, branch, version, digest)
        if now_on == branch:
            self.evals.due((branch, version))
        return now_on

    def checkpointed(
        self, now: float, incarnation: int, version: int, batch: int, path: Path, wait: bool = True
    ) -> bool:
        """Adds the buffer's part to the checkpoint at `path`, where the learner's part lies. Commits.

        Without `wait`, returns False while it is being written: ask again. Raises Refused, LedgerFailed.
        """
        self.batches.check(incarnation)
        return self._checkpoints.write(now, incarnation, version, batch, path, wait)

    def evaluate(self, version: tuple[int, int]) -> None:
        """Opens the held-out sets for every actor. Training leases are revoked; a trajectory that is put all the same
        still counts.

        Raises Refused for a version that was not published, since nobody could play the sets.
        """
        history = self.ledger.history
        published = -1 if history.published is None else history.published
        if not self.evals.known(version) and not (version[0] == history.branch and 0 <= version[1] <= published):
            raise Refused(
                "not_published",
                f"an evaluation is asked for version {version[1]} of branch {version[0]}; version {published} "
                f"of branch {history.branch} is the last that was published",
            )
        self.evals.evaluate(version)
        self._revoke_training()

    def evaluation(self, *, everyone: bool = False, lost: tuple[int, int] | None = None) -> EvalReply:
        history = self.ledger.history
        if lost is not None and history.published is not None:
            self.evals.lost(lost, (history.branch, history.published))
        if everyone != self.evals.everyone:
            self.evals.everyone = everyone and self.evals.is_open
            self._revoke_training()
        reply, failing = self.evals.reply(), self.tickets.failures.verdict
        return replace(reply, why=failing, failed=True) if failing and not reply.done else reply

    def _revoke_training(self) -> None:
        for lease in self.leases if self.evals.everyone else ():
            if not lease.eval:
                self.tickets.release(lease, "revoked")

    # Any process

    def caused(self) -> None:
        """The running learner is about to be ended on purpose: the batch that it holds is not suspected."""
        if self.ledger.history.current is not None:
            self.ledger.history.caused()

    def stop(self) -> None:
        """No further tickets. The running learner ends on purpose."""
        self.stopping = True
        self.caused()

    def status(self) -> dict[str, Any]:
        ledger, history = self.ledger, self.ledger.history
        branches = history.branches
        actors = Counter(lease.actor for lease in self.leases)
        queue = Counter(staleness(g, history.version) for g in ledger.live.values() if g.state == "waiting")
        flight = Counter(history.version - lease.min_version for lease in self.leases if not lease.eval)
        return {
            "branch": history.branch,
            "version": history.version,
            "published": history.published,
            "batches": len(history.line),
            "incarnation": len(history.incarnations),
            "equation": {str(branch): ledger.account.equation(branch) for branch in branches},
            "counters": {
                str(branch): {name: n for (b, name), n in sorted(ledger.account.counters.items()) if b == branch}
                for branch in branches
            },
            "refused": dict(self.tickets.validity.refused),
            "turns": _counted(self.tickets.carried.turns.counts),
            "staleness_in_queue": _sorted(queue),
            "staleness_in_flight": _sorted(flight),
            "leases": dict(actors),
            "held": {actor: list(version) for actor, version in sorted(self.actor_weights.items())},
            "places": {"taken": self.tickets.places.taken(), "capacity": self.rules.capacity},
            "disk_bytes": self.database.payloads.disk_bytes,
            "demonstrations": self.demonstrations.drawn,
            "unscored": len(self.scoring.waiting()),
            "scoring": self.scoring.leases,
            "teacher_silent": "" if not self.scoring.wanted or self.scoring.answering else self.scoring.silence,
            "lost_to_disk": self.lost_to_disk,
            "evaluating": self.evals.is_open,
            "players": self.evals.players.names(self.evals.everyone),
            "starved": self.tickets.filtering.starved,
            "stopping": self.stopping,
        }


def _counted(counts: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in sorted(counts.items()) if n}


def _sorted(histogram: Counter[int]) -> dict[str, int]:
    return {str(k): n for k, n in sorted(histogram.items())}
