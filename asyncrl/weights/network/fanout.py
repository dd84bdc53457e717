"""Decides which host fetches from which, so that no host sends a version to more than `fanout` others.

              server
             /      \\
         host 0    host 1        fanout 2: the first two fetch from the server, every next two from an earlier host
         /   \\     /   \\
     host 2   3    4    5

Pure: no sockets, no clock.
"""

from __future__ import annotations


class Fanout:
    """The hosts in the order in which they came, by the address at which each serves others.

    >>> fanout = Fanout(fanout=2, forget_s=20.0)
    >>> [fanout.join(f"host {i}", "", now=0.0) for i in range(6)]
    ['', '', 'host 0', 'host 0', 'host 1', 'host 1']
    >>> fanout.join("host 5", "host 1", now=1.0)  # its parent does not answer, and is removed
    'host 2'
    >>> fanout.join("host 0", "", now=30.0)  # all others have not asked for long
    ''
    """

    def __init__(self, fanout: int, forget_s: float) -> None:
        self._fanout, self._forget_s = fanout, forget_s
        self._heard: dict[str, float] = {}

    @property
    def hosts(self) -> int:
        return len(self._heard)

    def join(self, host: str, lost: str, now: float) -> str:
        """The host that `host` fetches from until it asks again; empty: the server. `lost` did not answer it."""
        self._heard = {each: at for each, at in self._heard.items() if at + self._forget_s > now and each != lost}
        self._heard[host] = now
        if not self._fanout:
            return ""
        order = list(self._heard)
        # A dictionary keeps the order of insertion, so a parent has always come earlier.
        parent = order.index(host) // self._fanout - 1
        return order[parent] if parent >= 0 else ""
