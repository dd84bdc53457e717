"""Answers those who read a live run (`asyncrl view`): committed rows and stored trajectories, bounded in size and rate.

Reading changes nothing and must cost the run nothing that shows: a page is one short transaction over a connection of
its own, and past `PER_S` in a second a reader is refused and asks again later. A request costs 1, and the record of a
trajectory 1 more for each `BYTES` of it, so that large ones are read and checksummed at `PER_S` MiB/s at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrl.buffer.client.pages import BYTES, MOST_BYTES, PER_S, Page
from asyncrl.buffer.ledger.pages import Pages
from asyncrl.buffer.ledger.storage.payloads import PayloadLost
from asyncrl.buffer.rules import Refused
from asyncrl.errors import RunError
from asyncrl.wire import Frame

if TYPE_CHECKING:
    from asyncrl.buffer.ledger.storage.database import Database


class Rate:
    """Pure: at most `per_s` in any second, counted in a bucket that fills evenly. What an admitted request costs
    beyond 1 is charged afterwards, and while the bucket is below 0 nobody is admitted.

    >>> rate = Rate(2, now=0.0)
    >>> [rate.allows(t) for t in (0.0, 0.0, 0.1, 0.6, 0.6)]
    [True, True, False, True, False]
    >>> rate.charge(1.5)
    >>> [rate.allows(t) for t in (1.0, 1.7, 1.9)]
    [False, False, True]
    """

    def __init__(self, per_s: int, now: float) -> None:
        self._per_s, self._left, self._at = per_s, float(per_s), now

    def allows(self, now: float) -> bool:
        self._left = min(self._left + max(now - self._at, 0.0) * self._per_s, float(self._per_s))
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def charge(self, cost: float) -> None:
        self._left -= cost


class Readers:
    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock
        self._rate = Rate(PER_S, clock())
        self._pages: Pages | None = None

    def page(self, group: int, batch: int) -> Page:
        """Raises Refused."""
        pages = self._admitted()
        try:
            return pages.page(group, batch)
        except RunError as error:
            raise Refused("unreadable", str(error)) from error

    def record(self, group: int, index: int) -> Frame | None:
        """The stored bytes of a trajectory; None: there are none, or none any more. Raises Refused."""
        pages = self._admitted()
        try:
            location = pages.location(group, index)
            if location is not None and location.bytes > MOST_BYTES:
                raise Refused(
                    "too_large",
                    f"trajectory {group}.{index} has {location.bytes} bytes, readers get at most {MOST_BYTES}: view it "
                    "when the run is over",
                )
            if location is None:
                return None
            self._rate.charge(location.bytes / BYTES)
            return self._database.payloads.read(location)
        except (RunError, PayloadLost) as error:
            raise Refused("unreadable", str(error)) from error

    def _admitted(self) -> Pages:
        if not self._rate.allows(self._clock()):
            raise Refused("busy", f"more than {PER_S} requests or MiB of readers in a second: ask again a little later")
        if self._pages is None:
            try:
                self._pages = Pages(self._database.path)
            except RunError as error:
                raise Refused("unreadable", str(error)) from error
        return self._pages
