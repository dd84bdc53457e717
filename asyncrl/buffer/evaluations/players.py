"""Which actors play an evaluation during the run. Pure: time is an argument.

Reserved actors (`actors.eval`) play nothing else. With none reserved, or none of them heard of for a lease's term, at
most `eval.share` of the actors are chosen, at least one: those that ask first. A chosen one takes no training tickets
until its part is done; one that is not heard of for a lease's term makes room for another.
"""

from __future__ import annotations

import re


class Players:
    def __init__(self, reserved: int, share: float, lease_s: float) -> None:
        self._reserved, self._share, self._lease_s = reserved, share, lease_s
        self._heard: dict[str, float] = {}
        """When each actor last asked for tickets or renewed a lease."""
        self._chosen: set[str] = set()
        self._reserved_heard: float | None = None
        """When a reserved actor was heard last; before the first, when any was heard first."""

    def is_reserved(self, actor: str) -> bool:
        """
        >>> [Players(2, 1.0, 9.0).is_reserved(name) for name in ("actor-1", "actor-2", "joined-0")]
        [True, False, False]
        """
        number = re.fullmatch(r"actor-(\d{1,9})", actor)
        return number is not None and int(number[1]) < self._reserved

    def heard(self, now: float, actor: str) -> None:
        self._heard[actor] = now
        if self._reserved_heard is None or self.is_reserved(actor):
            self._reserved_heard = now

    def left(self, actor: str) -> None:
        self._heard.pop(actor, None)

    def plays(self, now: float, actor: str, wanted: bool, leased: bool) -> bool:
        """Whether an actor that asks for tickets plays the open evaluation.

        `wanted`: there are tickets that nobody holds. `leased`: the actor holds some.

        >>> players = Players(0, 0.5, 9.0)
        >>> [players.plays(0.0, actor, True, False) for actor in "abcd"]
        [True, False, False, True]
        >>> players.plays(0.0, "a", False, False), players.plays(0.0, "b", True, False)
        (False, True)
        >>> players = Players(1, 0.5, 9.0)
        >>> [players.plays(now, "actor-1", True, False) for now in (0.0, 9.0, 9.1)]
        [False, False, True]
        """
        self.heard(now, actor)
        if self._reserved and now - (self._reserved_heard or 0.0) <= self._lease_s:
            return self.is_reserved(actor) or (leased and actor in self._chosen)
        self._heard = {name: at for name, at in self._heard.items() if now - at <= self._lease_s}
        self._chosen &= self._heard.keys()
        if leased:
            self._chosen.add(actor)
        elif not wanted:
            self._chosen.discard(actor)
        elif len(self._chosen) < max(1, int(self._share * len(self._heard))):
            self._chosen.add(actor)
        return actor in self._chosen

    def names(self, everyone: bool) -> list[str]:
        """The actors that do not train now."""
        return sorted(name for name in self._heard if everyone or name in self._chosen or self.is_reserved(name))

    def over(self) -> None:
        """No evaluation is open any more."""
        self._chosen.clear()
