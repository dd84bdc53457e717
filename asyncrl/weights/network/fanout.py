"""Which host fetches from which, so that nobody sends a version to more than `fanout` hosts.

              server
             /      \\
         host 0    host 1        fanout 2: the first two fetch from the server, every next two from one that came before
         /   \\     /   \\
     host 2   3    4    5

Deciding only: no sockets, no clock.
"""

from __future__ import annotations


class Tree:
    """Hosts, in the order in which they came, by the address at which each hands versions on.

    >>> tree = Tree(fanout=2, forget_s=20.0)
    >>> [tree.join(f"host {i}", "", now=0.0) for i in range(6)]
    ['', '', 'host 0', 'host 0', 'host 1', 'host 1']
    >>> tree.join("host 5", "host 1", now=1.0)  # it hears nothing from its parent, who is taken out
    'host 2'
    >>> tree.join("host 0", "", now=30.0)  # all others have not been heard of for long
    ''
    """

    def __init__(self, fanout: int, forget_s: float) -> None:
        self._fanout, self._forget_s = fanout, forget_s
        self._heard: dict[str, float] = {}

    @property
    def hosts(self) -> int:
        return len(self._heard)

    def join(self, host: str, lost: str, now: float) -> str:
        """From where `host` fetches until it asks again; empty: from the server. `lost`: who does not answer it."""
        self._heard = {each: at for each, at in self._heard.items() if at + self._forget_s > now and each != lost}
        self._heard[host] = now
        if not self._fanout:
            return ""
        order = list(self._heard)
        # A dictionary keeps the place of who is in it, so a parent has always come before.
        parent = order.index(host) // self._fanout - 1
        return order[parent] if parent >= 0 else ""
