"""A subscriber whose versions come from another host: a mirror (mirror.py) and what reads its folder."""

from __future__ import annotations

from pathlib import Path

from asyncrl.sockets import Endpoint
from asyncrl.weights.local.shm import ShmSubscriber
from asyncrl.weights.network.mirror import Mirror
from asyncrl.weights.protocol import WeightsVersion


class MirroredSubscriber(ShmSubscriber):
    def __init__(self, dir: Path, server: Endpoint | str, relays: bool = False) -> None:
        """`relays`: this host hands on what it fetches."""
        super().__init__(dir)
        self.mirror = Mirror(dir, server, relays=relays)
        self.mirror.start()

    def latest(self) -> WeightsVersion | None:
        """Raises RunError when nothing new can come any more."""
        self.mirror.check()
        return super().latest()

    def close(self) -> None:
        super().close()
        self.mirror.close()
