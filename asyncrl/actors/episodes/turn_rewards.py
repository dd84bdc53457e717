"""The rewards of each turn, the state in which it was sampled, and where its tokens are.

    environment.step ──reward, parts, state──> Earnings ──┐
    rows ──spans of sampled tokens──────────────────────┴──> TurnReward of each turn

The key that comes with the answer to a turn names the state in which the *next* turn is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from asyncrl.actors.envs.protocol import EnvFailed
from asyncrl.trajectory import MAX_PARTS, MAX_STATE_BYTES, Span, TurnReward

Spans = tuple[Span, ...]


@dataclass(slots=True)
class Earnings:
    """What the turns of an episode have earned so far."""

    _rewards: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    _states: list[bytes | None] = field(default_factory=lambda: [None])
    """Of each turn so far, and of the next one."""

    def begin(self, state: str | bytes | None) -> None:
        """`state`: key of the state in which the first turn is sampled. Raises EnvFailed for what is no key."""
        self._states = [key_of(state, "reset_state")]

    def add(self, reward: float, parts: Mapping[str, float], state: str | bytes | None) -> None:
        """Raises EnvFailed for what is no key, and for too many parts."""
        if len(parts) > MAX_PARTS:
            raise EnvFailed(f"rewards has {len(parts)} names, at most {MAX_PARTS} are recorded")
        self._states.append(key_of(state, "state"))
        self._rewards.append((float(reward), {name: float(value) for name, value in parts.items()}))

    def unheard(self) -> None:
        """A turn that the environment did not hear, a summary (compaction.py): it earns nothing itself, and the next
        one is sampled in the state that the answer before it left."""
        self._rewards.append((0.0, {}))
        self._states.insert(-1, None)

    def by_turn(self, spans: Sequence[Spans]) -> tuple[TurnReward, ...]:
        """`spans`: of each turn."""
        earned = zip(self._rewards, spans, self._states[:-1], strict=True)
        return tuple(TurnReward(reward, where, state, parts) for (reward, parts), where, state in earned)


def of_last_turn(spans: Sequence[Spans], reward: float, parts: Mapping[str, float]) -> tuple[TurnReward, ...]:
    """Those of an episode whose reward is known only at its end."""
    turns = tuple(TurnReward(0.0, where) for where in spans)
    return with_more(turns, reward, parts)


def with_more(turns: tuple[TurnReward, ...], reward: float, parts: Mapping[str, float]) -> tuple[TurnReward, ...]:
    """With a reward added to that of the last turn."""
    if not turns:
        return ()
    last = turns[-1]
    return (*turns[:-1], replace(last, reward=last.reward + reward, rewards={**last.rewards, **parts}))


def key_of(state: str | bytes | None, name: str) -> bytes | None:
    """The key as it is recorded; a text as UTF-8. Raises EnvFailed for one that is too long, or no text and no bytes.

    >>> key_of("kitchen", "state"), key_of(None, "state")
    (b'kitchen', None)
    """
    if state is None:
        return None
    if not isinstance(state, str | bytes):
        raise EnvFailed(f"{name} is a {type(state).__name__}, expected a text, bytes or None (asyncrl.state_key)")
    key = state.encode() if isinstance(state, str) else state
    if len(key) > MAX_STATE_BYTES:
        raise EnvFailed(
            f"{name} has {len(key)} bytes, at most {MAX_STATE_BYTES} are recorded: give asyncrl.state_key of it"
        )
    return key
