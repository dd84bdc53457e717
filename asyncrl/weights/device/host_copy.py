"""The version of an evaluation, kept in host memory beside the newest one on GPUs (`eval.every` over these channels).

    learner's GPU: newest version ──────────────────────────────> every engine, as ever (publisher.py)
        └──copied, when it is pinned──> folder in shared memory ──> actors that evaluate, when a newer one is there

So a pinned version takes no room on a GPU, and is there for an actor or a learner that was restarted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from asyncrl.weights.device.publisher import DevicePublisher
from asyncrl.weights.local.shm import ShmPublisher
from asyncrl.weights.protocol import Subscriber, Weights, WeightsVersion


class PinningPublisher:
    """The learner's end. `dir` holds the pinned version alone."""

    def __init__(self, device: DevicePublisher, dir: Path) -> None:
        self._device, self._host = device, ShmPublisher(dir)

    def publish(self, branch: int, version: int, named: Iterable[tuple[str, Tensor]]) -> WeightsVersion:
        return self._device.publish(branch, version, named)

    def latest(self) -> WeightsVersion | None:
        return self._device.latest()

    def pin(self, version: tuple[int, int]) -> bool:
        """Copies it, if it is the newest and not there yet, and waits for the copy. Raises RunError without room."""
        if self._host.pin(version):
            return True
        newest = self._device.latest()
        if newest is None or newest.order != version:
            return False
        self._host.publish_pinned(*version, self._device.tensors())
        return True

    def unpin(self) -> None:
        self._host.unpin()

    def close(self) -> None:
        self._device.close()


class PinnedSubscriber:
    """An actor's end: `device` has the newest version, `host` the pinned one."""

    def __init__(self, device: Subscriber, host: Subscriber) -> None:
        self._device, self._host = device, host

    def latest(self) -> WeightsVersion | None:
        return self._device.latest()

    def pinned(self) -> WeightsVersion | None:
        return self._host.pinned()

    def open(self, verify: bool = True, version: tuple[int, int] | None = None) -> Weights:
        """From the GPU, unless `version` is another than the newest."""
        newest = self._device.latest()
        on_device = version is None or (newest is not None and newest.order == version)
        return (self._device if on_device else self._host).open(verify, version)

    def close(self) -> None:
        self._device.close()
        self._host.close()
