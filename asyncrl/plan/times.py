"""The times from which a plan is played: what fitting makes of a record, and what playing plays. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.trajectory import StopReason


@dataclass(frozen=True, slots=True)
class Turn:
    prefilled: int
    """Tokens computed before the first one is sampled."""
    sampled: int
    environment: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One recorded episode, to be played again."""

    env: str
    turns: Sequence[Turn]
    outside: float
    """Seconds in none of its turns: rendering, `reset`, the put."""
    tokens: int
    """Tokens of all rows, context included."""
    bytes: int
    """Bytes of its payload."""
    reward: float
    stop_reason: StopReason

    @property
    def policy_tokens(self) -> int:
        return sum(turn.sampled for turn in self.turns)


Group = tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """One engine: a token of each running request takes `base_s + per_request_s * requests in flight`; while tokens are
    prefilled, no request goes on."""

    base_s: float
    per_request_s: float
    prefill_s: float
    """Per token."""

    def step_s(self, running: int) -> float:
        """Seconds in which each of `running` requests gets a token."""
        return self.base_s + self.per_request_s * running

    def scaled(self, factor: float) -> EngineTimes:
        return EngineTimes(self.base_s * factor, self.per_request_s * factor, self.prefill_s * factor)


@dataclass(frozen=True, slots=True)
class LearnerTimes:
    fixed_s: float
    """Seconds of a step whatever its batch: those of the optimizer."""
    per_token_s: float
    """Seconds of a step per token of its batch, context included."""
    around_s: float
    """From the fixed batch to its outcome, besides the step."""
    publish_s: float
    """From the outcome to the publication."""
    after_s: float
    """From there to the next request, where no checkpoint is written."""
    checkpoint_s: float

    def step_s(self, tokens: int) -> float:
        return self.fixed_s + self.per_token_s * tokens

    def scaled(self, factor: float) -> LearnerTimes:
        """With another speed of the step; what is not computed stays."""
        return LearnerTimes(
            self.fixed_s * factor, self.per_token_s * factor, self.around_s, self.publish_s, self.after_s,
            self.checkpoint_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Domain:
    """Cores that some roles share."""

    cores: float
    roles: frozenset[str]
    """Kinds of role (`actor`, `learner`) or names (`actor-0`)."""


@dataclass(frozen=True, slots=True)
class Times:
    groups: Sequence[Group]
    """Recorded groups, from which new ones are drawn."""
    engine: EngineTimes
    learner: LearnerTimes
    load_s: float
    """From the publication until an actor holds the version."""
    pause_s: float
    """The part of that in which its engine stands still."""
    failed: float
    """Share of attempts that fail in their environment."""
    background: float
    """Cores that buffer and launcher take."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the record itself says, for comparison with what is played. Each is None where it does not say."""

    step_s: float | None
    staleness: float | None
    dropped: float | None
    """Share of the groups that ended."""
    generate_s: float
    """Mean of a turn."""
    compute_s: float
    """Mean of a training step."""
    episodes: int
    steps: int
    actors: int
    """That played, those included that joined."""
