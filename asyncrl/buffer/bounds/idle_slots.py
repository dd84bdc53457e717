"""Which share of the actors' slots admission leaves without a ticket. Pure: time is an argument.

An actor that asks for tickets says how many slots it has free. From a request that admission refuses until one that is
answered otherwise, those of its slots without a lease are idle for the bound's sake.
"""

from __future__ import annotations

from dataclasses import dataclass

FORGOTTEN_S = 60.0
"""An actor that holds no ticket and has not asked for so long has left."""


@dataclass(frozen=True, slots=True)
class _Asked:
    at: float
    slots: int
    idle: int


class IdleSlots:
    def __init__(self, now: float) -> None:
        """
        >>> slots = IdleSlots(0.0)
        >>> slots.asked(0.0, "a", slots=4, leased=1, refused=True)
        >>> slots.asked(8.0, "a", slots=4, leased=4, refused=False)
        >>> slots.share(10.0, {"a": 4}), slots.share(12.0, {"a": 4})
        (0.6, 0.0)
        """
        self._last: dict[str, _Asked] = {}
        """The last request of each actor."""
        self._at, self._idle, self._available = now, 0.0, 0.0

    def asked(self, now: float, actor: str, *, slots: int, leased: int, refused: bool) -> None:
        """An actor with so many `slots` has asked and was answered. `leased`: to this actor, after the answer.
        `refused`: it got fewer tickets than it asked for, because of admission."""
        self._pass(now)
        self._last[actor] = _Asked(now, slots, max(0, slots - leased) if refused else 0)

    def share(self, now: float, leased: dict[str, int]) -> float:
        """Since the last call. `leased`: the tickets that each actor holds."""
        self._pass(now)
        idle, self._idle, available, self._available = self._idle, 0.0, self._available, 0.0
        self._last = {a: last for a, last in self._last.items() if now - last.at <= FORGOTTEN_S or leased.get(a)}
        return min(1.0, idle / available) if available > 0 else 0.0

    def _pass(self, now: float) -> None:
        passed, self._at = max(0.0, now - self._at), now
        self._idle += passed * sum(last.idle for last in self._last.values())
        self._available += passed * sum(last.slots for last in self._last.values())
