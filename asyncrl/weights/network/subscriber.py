"""The actor's end of weights that come from another host."""

from __future__ import annotations

from pathlib import Path

from asyncrl.sockets import Endpoint
from asyncrl.weights.local.shm import ShmSubscriber
from asyncrl.weights.network.mirror import Mirror
from asyncrl.weights.protocol import WeightsVersion


class MirroredSubscriber(ShmSubscriber):
    """A subscriber to versions of another host: a mirror, and a reader of its folder."""

    def __init__(self, dir: Path, server: Endpoint | str, relays: bool = False) -> None:
        """`relays`: this host serves what it fetches to others."""
        super().__init__(dir)
        self.mirror = Mirror(dir, server, relays=relays)
        self.mirror.start()

    def latest(self) -> WeightsVersion | None:
        """The newest version. Raises RunError if the mirror has failed."""
        self.mirror.check()
        return super().latest()

    def pinned(self) -> WeightsVersion | None:
        """The version kept for an evaluation. Raises RunError likewise."""
        self.mirror.check()
        return super().pinned()

    def close(self) -> None:
        super().close()
        self.mirror.close()
