"""A version that an evaluation is pinned to, under the channels on GPUs: in host memory, beside the newest on a GPU.
The device here is the CPU, the process group gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import Config
from asyncrl.launch.placement.resources import role_names
from asyncrl.weights.channels import server
from asyncrl.weights.device.host_copy import PinnedSubscriber, PinningPublisher
from asyncrl.weights.device.publisher import DevicePublisher
from asyncrl.weights.device.subscriber import DeviceSubscriber
from asyncrl.weights.device.transports import Broadcast
from asyncrl.weights.local.shm import ShmSubscriber
from asyncrl.weights.network.subscriber import MirroredSubscriber
from asyncrl.weights.protocol import Subscriber, WeightsCorrupt
from tests.waiting import until
from tests.weights.device.device_model import alike, model
from tests.weights.network.mirror_stage import Serving

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(60)


class Place:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.closing: list[Any] = []

    def learner(self) -> PinningPublisher:
        device = DevicePublisher(f"ipc://{self.path}/w", Broadcast("gloo", self.path, wait_s=10.0), CPU, slots=1)
        self.closing.append(PinningPublisher(device, self.path / "shm"))
        learner: PinningPublisher = self.closing[-1]
        return learner

    def actor(self, name: str, host: Subscriber | None = None) -> PinnedSubscriber:
        device = DeviceSubscriber(f"ipc://{self.path}/w", name, lambda: CPU)
        self.closing.append(PinnedSubscriber(device, host or ShmSubscriber(self.path / "shm")))
        actor: PinnedSubscriber = self.closing[-1]
        return actor


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for each in reversed(made.closing):
        each.close()


def has(actor: PinnedSubscriber, version: int, newest: int) -> bool:
    """Whether the actor gets this version, and the newest one, with their own tensors."""
    assert until(lambda: (at := actor.latest()) is not None and at.version == newest)
    opened, last = actor.open(version=(0, version)), None
    try:
        held = alike({name: tensor.clone() for name, tensor in opened.tensors()}, model(version))
        opened.close()
        last = actor.open()
        return held and opened.id.version == version and alike(dict(last.tensors()), model(newest))
    finally:
        for each in (opened, last):
            if each is not None:
                each.close()


def test_a_pinned_version_stays_while_newer_ones_take_the_only_slot_of_the_gpu(place: Place) -> None:
    learner, actor = place.learner(), place.actor("actor-0")
    id = learner.publish(0, 2, model(2).items())
    assert learner.pin((0, 2))
    for version in (3, 4):
        learner.publish(0, version, model(version).items())
    assert learner.latest() is not None
    assert actor.pinned() is not None
    assert actor.pinned().order == id.order  # type: ignore[union-attr]
    assert has(actor, 2, newest=4)
    assert has(place.actor("restarted"), 2, newest=4)
    assert learner.pin((0, 4)), "the next evaluation"
    assert len(list((place.path / "shm").glob("*.pinned"))) == 1, "one copy"
    with pytest.raises(WeightsCorrupt):
        actor.open(version=(0, 2))
    learner.unpin()
    assert actor.pinned() is None
    assert not list((place.path / "shm").glob("*.pinned"))


def test_a_learner_that_was_restarted_still_has_it_and_says_what_is_gone(place: Place) -> None:
    first = place.learner()
    first.publish(0, 2, model(2).items())
    assert not first.pin((0, 1)), "it was never here"
    assert first.pin((0, 2))
    first.close()
    place.closing.remove(first)
    again, actor = place.learner(), place.actor("actor-0")
    again.publish(0, 1, model(1).items())
    assert again.pin((0, 2))
    assert has(actor, 2, newest=1)
    again.unpin()
    assert not again.pin((0, 2)), "it was not made again yet"
    again.publish(0, 2, model(2).items())
    assert again.pin((0, 2))


def test_a_flipped_bit_of_the_device_is_not_pinned(place: Place) -> None:
    learner = place.learner()
    learner.publish(0, 0, model(0).items())
    learner._device._slots[0].chunks[0][100] ^= 1
    with pytest.raises(WeightsCorrupt, match="embed"):
        learner.pin((0, 0))
    assert ShmSubscriber(place.path / "shm").pinned() is None


def test_another_host_fetches_the_pinned_version_alone(place: Place) -> None:
    learner = place.learner()
    place.closing.append(Serving(place.path / "shm", f"ipc://{place.path}/pinned"))
    (place.path / "host").mkdir(mode=0o700)
    actor = place.actor("actor-0", MirroredSubscriber(place.path / "host" / "mirror", f"ipc://{place.path}/pinned"))
    learner.publish(0, 2, model(2).items())
    assert learner.pin((0, 2))
    learner.publish(0, 3, model(3).items())
    assert until(lambda: actor.pinned() is not None)
    assert has(actor, 2, newest=3)
    learner.unpin()
    assert until(lambda: actor.pinned() is None)


@pytest.mark.parametrize("channel", ["nccl", "cuda_ipc"])
@pytest.mark.parametrize(("every", "host", "serves"), [(0, "10.0.0.1", False), (5, "", False), (5, "10.0.0.1", True)])
def test_pinned_versions_are_served_where_actors_are_on_other_hosts(
    channel: str, every: int, host: str, serves: bool
) -> None:
    shares = {"learner": {"gpu_memory": 0.5}, "actors": {"engine": "vllm", "engine_options": {"gpu_memory": 0.35}}}
    values = {"weights": {"channel": channel}, "eval": {"every": every}, "launch": {"host": host}}
    config = Config.model_validate(values | (shares if channel == "cuda_ipc" else {}))
    assert ("weights" in role_names(config)) is serves
    assert (server(config) is not None) is serves
