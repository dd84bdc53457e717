"""Plays a run on the virtual clock: the buffer's own core and ledger, with actors and a learner that only take time.

    actor ──credits──> Buffer.issue ──ticket──> World.play ... ended ──> Buffer.accept, Buffer.fail
    learner ──> Buffer.batch ──> World.train ... done ──> Buffer.finished ──> Buffer.published ──> actors load

Nothing is decided here that the buffer decides: admission, the bound, drop / wait / mask, samplers, uses and filters
are its own code. What the buffer's loop and the actors' processes do around it is played as it is there: a request that
cannot be answered is held, in one line, and tried again after every event; an actor learns of a revoked lease when it
renews; new tickets need the published version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from asyncrl.buffer.client.messages import Told
from asyncrl.buffer.in_process import InProcessBuffer
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.data.base import Task
from asyncrl.plan.playing.clock import Clock
from asyncrl.plan.playing.outcome import Outcome, Tally, ended_groups
from asyncrl.plan.playing.world import Played, World
from asyncrl.plan.setting import Setting
from asyncrl.trajectory import CONTEXT, Lease, Row, Ticket, Trajectory

RETRY_S = 0.05
"""How often a learner that waits asks again where only time changes the answer (`over_age: wait`), as in the buffer."""
_COMMIT = 512
"""Puts per commit: nothing can be lost here, and a commit only bounds what SQLite holds open."""
_IDLE = 100_000
"""Events without a put after which a play counts as stuck: only renewals and retries go on for ever."""
_RECORD = b"plan"
"""Stands for a payload: nobody reads it."""


class EndlessTasks:
    """Tasks without content."""

    train_size: int | None = None
    held_out_size = 0

    def task(self, index: int) -> Task:
        return {"id": str(index), "prompt": ""}

    def held_out(self, index: int) -> Task:
        raise IndexError(index)


@dataclass(slots=True)
class _Actor:
    name: str
    slots: int
    held: int = 0
    waiting: bool = False
    """Its request is in the line."""
    playing: dict[Lease, float] = field(default_factory=dict)
    """Tickets, with the time of their issue."""

    @property
    def free(self) -> int:
        return max(0, self.slots - len(self.playing))


@dataclass(frozen=True, slots=True)
class Length:
    """How much is played."""

    warm_up: int
    """Training steps that are not measured."""
    steps: int
    """Training steps that are."""
    most_trajectories: int = 1 << 20
    """Past it the play ends, whatever was reached."""


@dataclass(frozen=True, slots=True)
class Joins:
    """Actors that are added when the learner has reached a version."""

    version: int
    count: int


class Play:
    """One play. `run` returns its outcome."""

    def __init__(
        self,
        rules: Rules,
        setting: Setting,
        world_on: Callable[[Clock], World],
        length: Length,
        *,
        checkpoint_every: int = 0,
        renew_s: float = 10.0,
        joins: Joins | None = None,
    ) -> None:
        """`renew_s`: after which an actor learns that a lease was revoked. `checkpoint_every`: 0 for none."""
        self._clock = Clock()
        self._world = world_on(self._clock)
        self._rules, self._setting, self._length, self._joins = rules, setting, length, joins
        self._checkpoint_every, self._renew_s = checkpoint_every, renew_s
        self._buffer = InProcessBuffer(rules, EndlessTasks(), clock=self._clock)
        self._core = self._buffer.core
        self._actors: list[_Actor] = []
        self._line: deque[_Actor] = deque()
        self._version, self._batch, self._incarnation = 0, 0, 0
        self._asking = False
        """The learner's request for a batch is held."""
        self._asked_at = 0.0
        self._waited_s, self._ended_at = 0.0, 0.0
        """How long it waited for the last batch, and when the one before it ended."""
        self._retrying = False
        self._idle = 0
        """Events since the last put."""
        self._puts = 0
        self.bounds: list[int] = []
        """The bound on staleness of each batch."""
        self.slots: list[int] = []
        """The slots of all actors when it was fixed."""
        self._tally = Tally(rules, setting, length.warm_up)

    def run(self) -> Outcome:
        """Ends early, with `stuck` set, where nothing but renewals happens any more."""
        with self._buffer:
            self._incarnation = self._core.start(0, 0, None).incarnation
            self._core.published(self._incarnation, 0, 0, "0")
            for _ in range(self._setting.actors):
                self._join()
            self._ask()
            while self._tally.steps < self._length.steps and self._puts < self._length.most_trajectories:
                self._idle += 1
                if not self._clock.next() or self._idle > _IDLE:
                    return self._tally.outcome(self._core, self._clock.now, stuck=self._why_stuck())
            return self._tally.outcome(self._core, self._clock.now)

    def _why_stuck(self) -> str:
        answer = self._core.batch(self._clock.now, self._incarnation, self._batch)
        return answer.why or answer.state

    # Actors

    def _join(self) -> None:
        number = self._core.tickets.bound.slots.number
        slots = self._setting.slots if number is None else number
        actor = _Actor(f"actor-{len(self._actors)}", slots, self._core.ledger.history.published or 0)
        self._actors.append(actor)
        self._world.join(actor.name, actor.held)
        self._tally.slots(self._clock.now, slots)
        self._clock.after(self._renew_s * (1 + len(self._actors) % 7 / 7), lambda: self._renew(actor))
        self._request(actor)

    def _request(self, actor: _Actor) -> None:
        """The actor asks for as many tickets as it has free slots."""
        if not actor.waiting:
            actor.waiting = True
            self._line.append(actor)
            self._serve()

    def _serve(self) -> None:
        """Answers the requests of the line until one gets nothing."""
        for _ in range(len(self._line)):
            actor = self._line[0]
            if not actor.free:
                self._line.popleft()
                actor.waiting = False
                continue
            if actor.held < (self._core.ledger.history.published or 0):
                self._line.rotate(-1)  # it stands in another line, until it has loaded
                continue
            tickets, _ = self._core.issue(self._clock.now, actor.name, (0, actor.held), actor.free)
            self._learn(actor)
            if not tickets and self._core.tickets.bound.slots.left(actor.name) != 0:
                return
            for ticket in tickets:
                self._begin(actor, ticket)
            if actor.free:
                self._line.rotate(-1)
            else:
                self._line.popleft()
                actor.waiting = False

    def _learn(self, actor: _Actor) -> None:
        """The reply says how many slots are in force."""
        number = self._core.tickets.bound.slots.number
        if number is not None and number != actor.slots:
            self._tally.slots(self._clock.now, number - actor.slots)
            actor.slots = number

    def _begin(self, actor: _Actor, ticket: Ticket) -> None:
        lease = ticket.id, ticket.attempt
        actor.playing[lease] = self._clock.now
        self._tally.playing(self._clock.now, 1)
        self._world.play(ticket, actor.name, lambda played: self._ended(actor, ticket, played))

    def _ended(self, actor: _Actor, ticket: Ticket, played: Played | None) -> None:
        lease = ticket.id, ticket.attempt
        if lease not in actor.playing:
            return  # it was given up
        self._free(actor, lease)
        try:
            if played is None:
                self._core.fail(actor.name, ticket.id, ticket.attempt, "env_error", "played as recorded")
            else:
                outcome = self._core.accept(_trajectory(ticket, actor.name, played), _RECORD)
                self._tally.put(outcome, played)
        except Refused:
            self._tally.refused += 1  # the buffer has ended the attempt
        self._puts, self._idle = self._puts + 1, 0
        if self._puts % _COMMIT == 0:
            self._core.commit(self._clock.now)
        if self._asking:
            self._ask()
        self._request(actor)
        self._serve()

    def _free(self, actor: _Actor, lease: Lease) -> None:
        del actor.playing[lease]
        self._tally.playing(self._clock.now, -1)

    def _renew(self, actor: _Actor) -> None:
        """Episodes whose lease was revoked are given up."""
        for lease in self._core.renew(self._clock.now, actor.name, list(actor.playing)):
            self._free(actor, lease)
        self._clock.after(self._renew_s, lambda: self._renew(actor))
        self._request(actor)

    def _load(self, actor: _Actor, version: int) -> None:
        if version > actor.held:
            actor.held = version
            self._world.loaded(actor.name, version)
            self._request(actor)
            self._serve()

    # The learner

    def _ask(self) -> None:
        """The learner asks for its next batch; while there is none, again after each event."""
        if not self._asking:
            self._asking, self._asked_at = True, self._clock.now
        answer = self._core.batch(self._clock.now, self._incarnation, self._batch)
        if answer.state == "ready" and answer.batch is not None:
            self._asking = False
            self._waited_s = self._clock.now - self._asked_at
            b, groups = self._batch, [self._core.ledger.live[number] for number in answer.batch.groups]
            self.bounds.append(answer.batch.bound)
            self.slots.append(sum(actor.slots for actor in self._actors))
            self._tally.fixed(self._clock.now, self._asked_at, answer.batch, groups)
            self._tally.live(self._core.tickets.places.taken(), ended_groups(self._core))
            self._world.train(b, sum(group.tokens for group in groups), lambda: self._finished(b))
            self._serve()
        elif self._rules.over_age == "wait" and not self._retrying:
            self._retrying = True
            self._clock.after(RETRY_S, self._ask_again)

    def _ask_again(self) -> None:
        self._retrying = False
        if self._asking:
            self._ask()
            self._serve()

    def _finished(self, b: int) -> None:
        now, since = self._clock.now, self._ended_at
        waited = self._waited_s / (now - since) if now > since else 0.0
        self._ended_at = now
        told = Told(min(1.0, waited), 1.0, 0.0, now - since)
        self._version = self._core.finished(self._incarnation, b, "applied", told, now)
        self._batch = b + 1
        if self._joins is not None and self._version == self._joins.version:
            for _ in range(self._joins.count):
                self._join()
        self._serve()
        if self._version % self._setting.every:
            self._published(self._version)
        else:
            self._clock.after(self._world.publish_s(self._version), lambda: self._publish(self._version))

    def _publish(self, version: int) -> None:
        self._core.published(self._incarnation, 0, version, str(version))
        for actor in self._actors:
            self._clock.after(self._world.load_s(actor.name, version), partial(self._load, actor, version))
        self._serve()
        self._published(version)

    def _published(self, version: int) -> None:
        """The learner goes on, published or not."""
        checkpoint = bool(self._checkpoint_every) and version % self._checkpoint_every == 0
        self._clock.after(self._world.after_s(version, checkpoint), self._ask)


def _trajectory(ticket: Ticket, actor: str, played: Played) -> Trajectory:
    """A trajectory with these versions and sizes; its tokens mean nothing."""
    values, counts = zip(*played.versions, strict=True)
    policy = sum(counts)
    context = max(0, played.tokens - policy)
    versions = np.repeat(np.array((CONTEXT, *values), np.int32), (context, *counts))
    nothing = np.zeros(len(versions), np.int32)
    row = Row(nothing, versions != CONTEXT, nothing.view(np.float32), versions)
    return Trajectory(
        id=ticket.id, attempt=ticket.attempt, kind="train", actor=actor, task_id=str(ticket.task["id"]),
        env=played.env, rows=(row,), reward=played.reward, rewards={}, turns=played.turns,
        stop_reason=played.stop_reason,
    )  # fmt: skip
