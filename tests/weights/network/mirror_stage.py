"""A learner's folder, a server of it and other hosts, for the tests of what goes between them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from asyncrl.sockets import Endpoint
from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber
from asyncrl.weights.network.mirror import Mirror
from asyncrl.weights.network.server import WeightsServer
from asyncrl.weights.protocol import WeightsVersion
from tests.waiting import until

WAIT_S = 20.0


def model(version: int, n: int = 300_000) -> dict[str, torch.Tensor]:
    """Each version differs from the one before in few elements."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(n, generator=g).bfloat16()
    w[: 10 * version] += 1
    return {"w": w, "b": torch.full((3,), float(version))}


class Serving:
    """A server in a thread of its own."""

    def __init__(
        self, folder: Path, where: Endpoint | str, full_every: int = 0, fanout: int = 0, relays: bool = False
    ) -> None:
        self.server = WeightsServer(folder, where, full_every, fanout, relays)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stop.is_set, 1e9, lambda: None))
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self.server.close()


class Place:
    """A learner's folder, a server of it, and other hosts."""

    def __init__(self, path: Path) -> None:
        self.path, self.address = path, f"ipc://{path}/s"
        self.publisher = ShmPublisher(path / "source")
        self.closing: list[Any] = []

    def serve(self, **options: Any) -> Serving:
        self.closing.append(Serving(self.path / "source", self.address, **options))
        serving: Serving = self.closing[-1]
        return serving

    def host(self, name: str = "host", **options: Any) -> Mirror:
        (self.path / name).mkdir(mode=0o700, exist_ok=True)
        self.closing.append(Mirror(self.path / name / "mirror", self.address, **options))
        self.closing[-1].start()
        mirror: Mirror = self.closing[-1]
        return mirror

    def publish(self, version: int, branch: int = 0, **options: Any) -> WeightsVersion:
        return self.publisher.publish(branch, version, model(version, **options).items())


def holds(mirror: Mirror, id: WeightsVersion) -> bool:
    return until(lambda: ShmSubscriber(mirror.dir).latest() == id)


def received(mirror: Mirror) -> dict[str, torch.Tensor]:
    opened = ShmSubscriber(mirror.dir).open()
    got = {name: tensor.clone() for name, tensor in opened.tensors()}
    opened.close()
    return got


def same(mirror: Mirror, version: int, **options: Any) -> bool:
    got, sent = received(mirror), model(version, **options)
    return got.keys() == sent.keys() and all(torch.equal(got[name], sent[name]) for name in sent)
