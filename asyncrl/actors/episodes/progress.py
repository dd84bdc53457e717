"""The limits of an episode, and how far it has come."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from asyncrl.actors.engines.protocol import Sampling
from asyncrl.actors.episodes.compaction import REQUEST, Compaction
from asyncrl.actors.episodes.spent import Spent
from asyncrl.config import Config
from asyncrl.trajectory import Ticket
from asyncrl.trajectory.turns import Recorded

Keep = Callable[[Recorded], Awaitable[bool]]
"""Returns when the buffer has answered: whether it has stored the record; if not, its disk has no room, and the episode
records nothing more. Raises EpisodeFailed: it is revoked, or refused."""


_BESIDE_A_SNAPSHOT = 1024
"""Bytes of `buffer.turn_max_kb` that are left to a turn's messages, at least."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The limits of every episode, from the config."""

    max_turns: int
    max_tokens: int
    """Limit of one row."""
    max_new_tokens: int
    """Limit of one turn."""
    call_s: float
    """Seconds for one call of the environment."""
    max_reward: float = 1e6
    """Largest size of a reward."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_kept: int = 0
    """Most kept ids of a token that is trained on; 0: none are recorded."""
    compact: float = 0.0
    """Share of `max_tokens` from which a row ends with a summary; 0: never."""
    compact_request: str = REQUEST
    max_snapshot: int = 1 << 20
    """Bytes of an environment's snapshot."""

    @classmethod
    def of(cls, config: Config) -> EpisodeLimits:
        env, actors = config.env, config.actors
        episode = (env.max_turns, env.max_tokens, actors.max_new_tokens, env.call_s, env.max_reward)
        most = actors.max_kept if actors.truncated else 0
        sampling = (actors.top_p, actors.top_k, actors.min_p, most)
        snapshot = config.buffer.turn_max_kb * 1024 - _BESIDE_A_SNAPSHOT
        return cls(*episode, *sampling, env.compact, env.compact_request or REQUEST, snapshot)

    @property
    def compaction(self) -> Compaction:
        from_tokens = self.compact * self.max_tokens if self.compact else math.inf
        return Compaction(from_tokens, self.max_turns, self.compact_request)

    def sampling(self, ticket: Ticket, turn: int, stop_token_ids: tuple[int, ...]) -> Sampling:
        """How the turn number `turn` of this ticket's episode is sampled; each turn has a seed of its own."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=ticket.temperature,
            stop_token_ids=stop_token_ids,
            seed=ticket.seed * 1_000_003 + turn,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            # What is not trained on needs none: evaluations, and greedy answers, which only give a reward.
            max_kept=self.max_kept if ticket.kind == "train" and ticket.temperature > 0 else 0,
        )


@dataclass(slots=True)
class Progress:
    """The state of one episode; the episode writes it, the thread that renews its lease reads it."""

    at: float
    """Time of the last progress, by `clock`; at first, the start of the episode."""
    phase: str = "environment"
    """`environment`, `generate`, `record` (waits until the buffer has stored a turn), or `put` (over, not yet
    acknowledged)."""
    tokens: int = 0
    """Tokens sampled so far."""
    kept_tokens: int = 0
    """Those of `tokens` that need not be sampled again: they came with the ticket, or are recorded."""
    interruptible: str = ""
    """Id of the engine's request, while it runs, of a turn whose tokens another actor can continue; else empty."""
    interrupted: bool = False
    """Set before aborting the request, when the actor shuts down."""
    handed_over: bool = False
    """The tokens of the aborted request are recorded in the buffer."""
    keep: Keep | None = None
    """Records a turn in the buffer; None: the ticket's turns are not durable (`buffer.turns`)."""
    begun_again: int = 0
    """How often the recording of earlier attempts did not fit, so that the episode began again."""
    prefix_breaks: int = 0
    """How often the chat template changed earlier tokens, so that a new row began."""
    turn_at: float = field(init=False)
    """Time at which the last turn of the policy ended, or its action was stepped again; at first, the start of the
    episode."""
    again_s: float = 0.0
    """Seconds in which the environment was brought to where the recorded turns end."""
    given: bool = False
    """Whether the latest turn or answer came from the recording: it was counted by the actor that played it."""
    compactions: int = 0
    """How often a summary replaced the conversation."""
    compacted_from: int = 0
    """Tokens of the rows that ended with a summary."""
    compacted_to: int = 0
    """Tokens of the prompts that began from one."""
    env: str = ""
    """The name under which the environment is counted."""
    tools: Spent = field(default_factory=Spent)
    """The tools that the environment called."""
    ignored_constraints: int = 0
    """Requests of an agent whose constraints on sampling were ignored."""
    seconds: dict[str, float] = field(default_factory=lambda: {"environment": 0.0, "generate": 0.0})
    clock: Callable[[], float] = time.monotonic
    changed: Callable[[], None] = lambda: None
    """Called when the phase changes."""
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.turn_at = self.at

    def sampled(self, tokens: int) -> None:
        """Count a finished turn of the policy, of `tokens` tokens."""
        self.tokens += tokens
        self.turn_at = self.clock()

    def stepped_again(self) -> None:
        """Note that a recorded turn was carried out again on the environment."""
        now = self.clock()
        self.again_s += now - self.turn_at
        self.turn_at = now

    def prefix_broke(self) -> None:
        """Count a chat template that changed earlier tokens."""
        self.prefix_breaks += not self.given

    def compacted(self, before: int, after: int) -> None:
        """Count a summary that replaced a row of `before` tokens by a prompt of `after`."""
        if self.given:
            return
        self.compactions += 1
        self.compacted_from += before
        self.compacted_to += after

    def enter(self, phase: str) -> None:
        now = self.clock()
        if self.phase in self.seconds:
            self.seconds[self.phase] += now - self.at
        self.at, self.phase = now, phase
        self.changed()
