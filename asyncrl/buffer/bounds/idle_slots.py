"""Which share of the actors' slots admission leaves without a ticket. Pure: time is an argument.

An actor that asks for tickets says how many slots it has free. From a request that admission refuses until one that it
meets, every slot without a lease is idle for the bound's sake.
"""

from __future__ import annotations

FORGOTTEN_S = 60.0
"""An actor that holds no ticket and has not asked for so long has left."""


class IdleSlots:
    def __init__(self, now: float) -> None:
        """
        >>> slots = IdleSlots(0.0)
        >>> slots.asked(0.0, "a", slots=4, leased=1, refused=True)
        >>> slots.asked(8.0, "a", slots=4, leased=4, refused=False)
        >>> slots.share(10.0, {"a": 4}), slots.share(12.0, {"a": 4})
        (0.6, 0.0)
        """
        self._slots: dict[str, int] = {}
        self._heard: dict[str, float] = {}
        self._total, self._idle_now = 0, 0
        self._at, self._idle, self._available = now, 0.0, 0.0

    def asked(self, now: float, actor: str, *, slots: int, leased: int, refused: bool) -> None:
        """An actor with so many `slots` has asked and was answered. `leased`: to all actors, after the answer.
        `refused`: it got fewer tickets than it asked for, because of admission."""
        self._pass(now)
        self._total += slots - self._slots.get(actor, 0)
        self._slots[actor], self._heard[actor] = slots, now
        self._idle_now = max(0, self._total - leased) if refused else 0

    def share(self, now: float, leased: dict[str, int]) -> float:
        """Since the last call. `leased`: the tickets that each actor holds."""
        self._pass(now)
        idle, self._idle, available, self._available = self._idle, 0.0, self._available, 0.0
        for actor in [a for a, at in self._heard.items() if now - at > FORGOTTEN_S and not leased.get(a)]:
            self._total -= self._slots.pop(actor)
            del self._heard[actor]
        return min(1.0, idle / available) if available > 0 else 0.0

    def _pass(self, now: float) -> None:
        passed, self._at = max(0.0, now - self._at), now
        self._idle += passed * self._idle_now
        self._available += passed * self._total
