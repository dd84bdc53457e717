"""What takes time in a play: episodes on engines, training steps, weights. Two worlds: a fitted one, and a record.

The fitted world draws recorded groups, with replacement, and plays their turns on modelled engines. The recorded world
gives every ticket, batch and version the seconds that the record has for it, so that what the buffer decides then can
be compared with what it decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from asyncrl.plan.playing.clock import Clock, Cores, Task
from asyncrl.plan.playing.engine import Engine, Versions
from asyncrl.plan.times import Domain, Episode, Times
from asyncrl.trajectory import StopReason, Ticket


@dataclass(frozen=True, slots=True)
class Played:
    """How an episode ended."""

    env: str
    versions: Sequence[tuple[int, int]]
    """(policy version, policy tokens of it), oldest first."""
    tokens: int
    """Tokens of all rows."""
    turns: int
    reward: float
    stop_reason: StopReason
    bytes: int = 0


Ended = Callable[[Played | None], None]
"""Takes the episode, or None where its environment failed."""


class World(Protocol):
    def join(self, actor: str, version: int) -> None:
        """A new actor holds this version."""

    def play(self, ticket: Ticket, actor: str, ended: Ended) -> None:
        """`ended` happens at the end of the episode, unless it never ends."""

    def train(self, b: int, tokens: int, done: Callable[[], None]) -> None:
        """`done` happens when the step on batch b is over."""

    def publish_s(self, version: int) -> float:
        """From the outcome to the publication."""

    def after_s(self, version: int, checkpoint: bool) -> float:
        """From there to the learner's next request."""

    def load_s(self, actor: str, version: int) -> float:
        """From the publication until the actor holds it."""

    def loaded(self, actor: str, version: int) -> None:
        """The actor has just taken it over."""


class Modelled:
    """The fitted world."""

    def __init__(self, clock: Clock, times: Times, domains: Sequence[Domain], rng: Random, threads: tuple[int, int]):
        """`threads`: of an engine and of the learner."""
        self._clock, self._times, self._rng, self._threads = clock, times, rng, threads
        self._cores = [(domain.roles, Cores(max(0.1, domain.cores - self._background(domain)))) for domain in domains]
        self._learner = Task(clock, self._cores_of("learner"), float(threads[1]))
        self.engines: dict[str, Engine] = {}
        self._drawn: dict[int, Sequence[Episode]] = {}
        """The recorded group that each group plays."""
        self.generated: list[float] = [0.0, 0.0]
        """Seconds and number of the turns."""
        self.trained: list[float] = [0.0, 0.0]
        """Seconds and number of the steps."""

    def _background(self, domain: Domain) -> float:
        return self._times.background if "buffer" in domain.roles else 0.0

    def _cores_of(self, role: str) -> Cores:
        for roles, cores in self._cores:
            if role in roles or role.partition("-")[0] in roles:
                return cores
        return Cores(float("inf"))

    def join(self, actor: str, version: int) -> None:
        cores = self._cores_of(actor)
        self.engines[actor] = Engine(self._clock, cores, self._times.engine, float(self._threads[0]), version)

    def play(self, ticket: Ticket, actor: str, ended: Ended) -> None:
        number, index = ticket.id.group, ticket.id.index
        if (group := self._drawn.get(number)) is None:
            group = self._drawn[number] = self._rng.choice(self._times.groups)
        # A larger group than the recorded one, or one recorded in pieces, takes the rest from others.
        episode = group[index] if index < len(group) else self._rng.choice(self._rng.choice(self._times.groups))
        fails = self._times.failed > 0 and self._rng.random() < self._times.failed
        playing = _Playing(self, self.engines[actor], episode, ended, fails)
        self._clock.after(episode.outside, playing.turn)

    def train(self, b: int, tokens: int, done: Callable[[], None]) -> None:
        begun, around = self._clock.now, self._times.learner.around_s

        def stepped() -> None:
            self.trained[0] += self._clock.now - begun
            self.trained[1] += 1
            self._clock.after(around, done)

        self._learner.begin(self._times.learner.step_s(tokens), stepped)

    def publish_s(self, version: int) -> float:
        return self._times.learner.publish_s

    def after_s(self, version: int, checkpoint: bool) -> float:
        return self._times.learner.after_s + (self._times.learner.checkpoint_s if checkpoint else 0.0)

    def load_s(self, actor: str, version: int) -> float:
        return self._times.load_s

    def loaded(self, actor: str, version: int) -> None:
        self.engines[actor].load(version, self._times.pause_s)

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        self._clock.after(seconds, do)

    def now(self) -> float:
        return self._clock.now


class _Playing:
    """One episode, turn by turn."""

    __slots__ = ("_begun", "_ended", "_engine", "_episode", "_fails", "_turn", "_versions", "_world")

    def __init__(self, world: Modelled, engine: Engine, episode: Episode, ended: Ended, fails: bool) -> None:
        self._world, self._engine, self._episode, self._ended, self._fails = world, engine, episode, ended, fails
        self._turn, self._begun = 0, 0.0
        self._versions: dict[int, int] = {}

    def turn(self) -> None:
        if self._turn == len(self._episode.turns):
            self._end()
            return
        turn = self._episode.turns[self._turn]
        self._begun = self._world.now()
        self._engine.request(turn.prefilled, turn.sampled, self._sampled)

    def _sampled(self, versions: Versions) -> None:
        world, turn = self._world, self._episode.turns[self._turn]
        world.generated[0] += world.now() - self._begun
        world.generated[1] += 1
        for version, count in versions:
            self._versions[version] = self._versions.get(version, 0) + count
        self._turn += 1
        if turn.environment or self._turn < len(self._episode.turns):
            world.later(turn.environment, self.turn)
        else:
            self._end()

    def _end(self) -> None:
        e = self._episode
        versions = sorted((v, n) for v, n in self._versions.items() if n)
        if self._fails or not versions:
            self._ended(None)
            return
        self._ended(Played(e.env, versions, e.tokens, len(e.turns), e.reward, e.stop_reason, e.bytes))


Attempted = tuple[int, int, int]
"""Group, index and attempt."""


@dataclass(frozen=True, slots=True)
class RecordedTimes:
    """The seconds of one run, thing by thing."""

    episodes: Mapping[Attempted, tuple[float, Played | None]]
    """From its issue to its end; None: its environment failed. An attempt that is not there never ended by itself."""
    steps: Mapping[int, float]
    """By batch, from the fixed batch to its outcome."""
    publish: Mapping[int, float]
    """By version, from the outcome to the publication."""
    loads: Mapping[tuple[str, int], float]
    """By actor and version, from the publication until it is held."""
    load_s: float
    """Where `loads` does not say."""
    after_s: float


class Recorded:
    """The world as it was recorded. What the record does not have takes no time, and is counted."""

    def __init__(self, clock: Clock, times: RecordedTimes) -> None:
        self._clock, self._times = clock, times
        self.unknown = 0
        """Steps and publications that the record does not have."""

    def join(self, actor: str, version: int) -> None: ...

    def play(self, ticket: Ticket, actor: str, ended: Ended) -> None:
        found = self._times.episodes.get((ticket.id.group, ticket.id.index, ticket.attempt))
        if found is not None:
            seconds, played = found
            self._clock.after(seconds, lambda: ended(played))

    def train(self, b: int, tokens: int, done: Callable[[], None]) -> None:
        self.unknown += b not in self._times.steps
        self._clock.after(self._times.steps.get(b, 0.0), done)

    def publish_s(self, version: int) -> float:
        self.unknown += version not in self._times.publish
        return self._times.publish.get(version, 0.0)

    def after_s(self, version: int, checkpoint: bool) -> float:
        return self._times.after_s

    def load_s(self, actor: str, version: int) -> float:
        return self._times.loads.get((actor, version), self._times.load_s)

    def loaded(self, actor: str, version: int) -> None: ...
