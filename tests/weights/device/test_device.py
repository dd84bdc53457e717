"""Weights leased by the learner: metadata, order, loans, checksums. The device here is the CPU, the process group gloo
(between two processes where it says so), memory of a GPU that another process maps is faked."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.errors import RunError
from asyncrl.weights.device import subscriber
from asyncrl.weights.device.process_group import ProcessGroup
from asyncrl.weights.device.publisher import DevicePublisher
from asyncrl.weights.device.snapshot import all_views
from asyncrl.weights.device.subscriber import DeviceSubscriber, join_group
from asyncrl.weights.device.transports import Broadcast, Mapped, Transport
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion
from tests.waiting import until
from tests.weights.device.device_model import alike, model
from tests.weights.device.fake_gpu_memory import fake_export, fake_mapped

CPU = torch.device("cpu")
WAIT_S = 20.0
pytestmark = pytest.mark.timeout(60)


class Place:
    def __init__(self, path: Path) -> None:
        self.path, self.address = path, f"ipc://{path}/w"
        self.closing: list[Any] = []

    def learner(self, transport: Transport | None = None, **options: Any) -> DevicePublisher:
        made = DevicePublisher(self.address, transport or Mapped(fake_export), CPU, chunk_bytes=4096, **options)
        self.closing.append(made)
        return made

    def actor(self, name: str = "actor-0", **options: Any) -> DeviceSubscriber:
        made = DeviceSubscriber(self.address, name, lambda: CPU, map_chunk=fake_mapped, **options)
        self.closing.append(made)
        return made


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for each in reversed(made.closing):
        each.close()


# Over sockets.


def test_versions_in_order_to_actors_that_come_and_go(place: Place) -> None:
    learner, actor = place.learner(), place.actor()
    assert actor.latest() is None
    with pytest.raises(WeightsCorrupt, match="nothing was published"):
        actor.open()
    for version in range(4):
        id = learner.publish(0, version, model(version).items())
        assert learner.latest() == id
        assert until(lambda id=id: actor.latest() == id)  # type: ignore[misc]
        leased = actor.open()
        assert leased.id == id
        assert alike(dict(leased.tensors()), model(version))
        leased.close()
    late = place.actor("late")
    assert until(lambda: late.latest() == id)
    assert alike(dict(late.open().tensors()), model(3))
    branch = learner.publish(1, 2, model(9).items())
    assert until(lambda: actor.latest() == branch)


def test_what_is_copied_is_given_back_and_training_goes_on_meanwhile(place: Place) -> None:
    learner, actor = place.learner(lease_s=50.0), place.actor()
    learner.publish(0, 0, model(0).items())
    leased = actor.open()
    learner.publish(0, 1, model(1).items())
    published = threading.Event()

    def publish() -> None:
        learner.publish(0, 2, model(2).items())
        published.set()

    thread = threading.Thread(target=publish)
    thread.start()
    assert not published.wait(0.3), "one slot is the newest, the other is read"
    assert alike(dict(leased.tensors()), model(0))
    assert published.wait(WAIT_S)
    thread.join()
    assert alike(dict(leased.tensors()), model(0)), "a copy"


def test_a_reader_that_is_too_slow_is_not_waited_for_and_may_not_use_what_it_read(place: Place) -> None:
    learner, actor = place.learner(lease_s=0.2), place.actor()
    learner.publish(0, 0, model(0).items())
    leased = actor.open()
    chunks = actor.chunks(leased._terms, leased.layout)
    next(chunks)
    for version in (1, 2):
        learner.publish(0, version, model(version).items())
    with pytest.raises(WeightsCorrupt, match="may be torn"):
        leased.settle()
    with pytest.raises(WeightsCorrupt, match="checksum"):
        dict(leased.tensors())
    assert alike(dict(actor.open().tensors()), model(2))


def test_a_version_that_is_asked_for_is_not_replaced_by_a_newer_one(place: Place) -> None:
    """An evaluation's version; the actor has not heard of the newer one yet."""
    learner, actor = place.learner(lease_s=50.0), place.actor()
    id = learner.publish(0, 0, model(0).items())
    assert until(lambda: actor.latest() == id)
    assert actor.open(version=id.order).id == id
    actor._stop.set()
    actor._watch.end()
    actor._thread.join()
    learner.publish(0, 1, model(1).items())
    assert actor.latest() == id
    with pytest.raises(WeightsCorrupt, match=r"version \(0, 0\) is no longer on the learner's GPU"):
        actor.open(version=id.order)
    assert learner._leases.of("actor-0") is None, "what was lent is given back"
    assert actor.open().id.version == 1


def test_a_chunk_is_exported_once_however_often_it_is_read(place: Place) -> None:
    """Torch keeps something of every export for as long as the memory is there."""
    exported: list[Tensor] = []

    def counted(chunk: Tensor) -> dict[str, Any]:
        exported.append(chunk)
        return fake_export(chunk)

    learner, actors = place.learner(Mapped(counted)), [place.actor(f"actor-{i}") for i in range(2)]
    for version in range(4):
        learner.publish(0, version, model(version).items())
        for actor in actors:
            leased = actor.open()
            assert alike(dict(leased.tensors()), model(version))
            leased.close()
    assert len(exported) == sum(len(slot.chunks) for slot in learner._slots)


def test_a_flipped_bit_is_not_served(place: Place) -> None:
    learner, actor = place.learner(), place.actor()
    learner.publish(0, 0, model(0).items())
    leased = actor.open()
    learner._slots[0].chunks[0][100] ^= 1
    with pytest.raises(WeightsCorrupt, match="embed"):
        dict(leased.tensors())


def test_a_learner_that_is_gone_and_one_that_comes_back(place: Place) -> None:
    learner, actor = place.learner(), place.actor(answer_s=0.3)
    id = learner.publish(0, 5, model(5).items())
    assert until(lambda: actor.latest() == id)
    learner.close()
    place.closing.remove(learner)
    assert actor.latest() == id, "what was held is served on"
    with pytest.raises(WeightsCorrupt, match="did not answer"):
        actor.open()
    again = place.learner()
    id = again.publish(0, 6, model(6).items())
    assert until(lambda: actor.latest() == id)
    assert alike(dict(actor.open().tensors()), model(6))


def test_a_learner_that_can_answer_nobody_any_more_says_so(place: Place) -> None:
    def broken(chunk: Tensor) -> dict[str, Any]:
        raise RuntimeError("CUDA error: out of handles")

    learner, actor = place.learner(Mapped(broken)), place.actor(answer_s=0.3)
    learner.publish(0, 0, model(0).items())
    with pytest.raises(WeightsCorrupt, match="did not answer"):
        actor.open()
    assert until(lambda: not learner._thread.is_alive()), "the answering thread may take the request later"
    with pytest.raises(RunError, match="out of handles"):
        learner.publish(0, 1, model(1).items())


def test_what_the_learner_does_not_understand_is_refused(place: Place) -> None:
    learner, actor = place.learner(), place.actor()
    learner.publish(0, 0, model(0).items())
    for op, fields in [
        ("latest", {"held": [1], "wait_s": 0}), ("latest", {"held": [0, 0, ""], "wait_s": -1}), ("join", {"ranks": 0}),
        ("latest", {"held": [0, 0, ""], "wait_s": float("nan")}), ("join", {"ranks": 1}), ("send", {}), ("x", {}),
    ]:  # fmt: skip
        with pytest.raises(WeightsCorrupt, match="refused"):
            actor.client.ask(op, **fields)
    actor.client._link.socket.send_multipart([b"\xff", b""])
    assert alike(dict(actor.open().tensors()), model(0)), "it serves on"


# A process group, gloo here.


def test_broadcast_to_several_actors(place: Place) -> None:
    learner = place.learner(Broadcast("gloo", place.path, wait_s=10.0))
    actors = [place.actor(f"actor-{i}") for i in range(2)]
    for version in range(3):
        id = learner.publish(0, version, model(version).items())
        for actor in actors:
            assert until(lambda a=actor, id=id: a.latest() == id)  # type: ignore[misc]
            leased = actor.open()
            assert alike(dict(leased.tensors()), model(version))
            leased.close()


def receive(address: str, told: Connection) -> None:
    """An engine with two processes of its own, one of them here, the other in a thread."""
    torch.set_num_threads(1)
    actor = DeviceSubscriber(address, "actor-0", lambda: CPU)
    with ThreadPoolExecutor(2) as pool:
        groups: list[ProcessGroup] = []
        for _ in range(2):
            version = told.recv()
            assert until(lambda v=version: (actor.latest() or WeightsVersion(0, 0, "")).version == v)  # type: ignore
            leased = actor.open()
            if (meeting := leased.group(2)) is not None:
                groups = list(pool.map(join_group, [meeting] * 2, (1, 2)))
            leased.send()
            layouts = [leased.layout] * 2
            got = list(
                pool.map(lambda g, layout: dict(all_views(layout, g.receive(layout.sizes, CPU))), groups, layouts)
            )
            leased.settle()
            told.send([alike(each, model(version)) for each in got])
            leased.close()
    actor.close()


@pytest.mark.system
def test_between_two_processes_to_an_engine_of_two(place: Place) -> None:
    learner = place.learner(Broadcast("gloo", place.path, wait_s=20.0))
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(place.address, there), daemon=True)
    process.start()
    try:
        for version in (3, 4):
            learner.publish(0, version, model(version).items())
            here.send(version)
            assert here.poll(40)
            assert here.recv() == [True, True]
    finally:
        process.kill()
        process.join(10)


def test_an_engine_that_dies_while_it_receives_holds_nobody_up(place: Place) -> None:
    learner = place.learner(Broadcast("gloo", place.path, wait_s=1.0))
    learner.publish(0, 0, model(0).items())
    dying, other = place.actor("dying"), place.actor("other")
    leased = dying.open()
    meeting = leased.group(1)
    assert meeting is not None
    group = join_group(meeting, 1)
    leased.send()
    group.close()
    learner.publish(0, 1, model(1).items())
    assert alike(dict(other.open().tensors()), model(1))


def test_one_copy_is_enough_for_a_broadcast(place: Place) -> None:
    """F14: `nccl` held two copies of the weights on the learner's GPU."""
    learner = place.learner(Broadcast("gloo", place.path, wait_s=10.0), slots=1)
    reader, other = place.actor("reader"), place.actor("other")
    id = learner.publish(0, 0, model(0).items())
    assert until(lambda: reader.latest() == id)
    leased = reader.open()
    published = threading.Event()
    thread = threading.Thread(target=lambda: (learner.publish(0, 1, model(1).items()), published.set()))
    thread.start()
    assert not published.wait(0.3), "it is being read"
    with pytest.raises(WeightsCorrupt, match="newer than 0 is being written: ask again"):
        other.open()
    assert alike(dict(leased.tensors()), model(0))
    assert published.wait(WAIT_S)
    thread.join()
    for actor in (reader, other):
        assert alike(dict(actor.open().tensors()), model(1))
    assert len(learner._slots) == 1


def test_a_send_that_fails_gives_the_only_copy_back(place: Place) -> None:
    """A publication would wait for the lease of an engine that is dead, for a minute."""
    learner = place.learner(Broadcast("gloo", place.path, wait_s=1.0), slots=1, lease_s=50.0)
    learner.publish(0, 0, model(0).items())
    dying, other = place.actor("dying"), place.actor("other")
    leased = dying.open()
    meeting = leased.group(1)
    assert meeting is not None
    group = join_group(meeting, 1)
    group.close()
    leased.send()
    begun = time.monotonic()
    learner.publish(0, 1, model(1).items())
    assert time.monotonic() - begun < 25.0
    assert alike(dict(other.open().tensors()), model(1))


def test_the_group_of_an_actor_that_is_gone_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread and, over NCCL, memory of the learner's GPU."""
    monkeypatch.setattr(subscriber, "WAIT_S", 0.1)
    transport = Broadcast("gloo", place.path, wait_s=5.0)
    learner = place.learner(transport, forget_s=1.5)
    learner.publish(0, 0, model(0).items())
    stays, goes = place.actor("stays"), place.actor("goes")
    for actor in (stays, goes):
        leased = actor.open()
        assert alike(dict(leased.tensors()), model(0))
        leased.close()
    assert transport._readers.keys() == {"stays", "goes"}
    goes.close()
    place.closing.remove(goes)
    assert until(lambda: "goes" not in transport._readers)
    assert until(lambda: not any(thread.name == "weights of goes" for thread in threading.enumerate()))
    assert transport._readers.keys() == {"stays"}


def test_an_engine_whose_group_was_given_up_joins_another(place: Place) -> None:
    transport = Broadcast("gloo", place.path, wait_s=0.3)
    learner, actor = place.learner(transport), place.actor()
    learner.publish(0, 0, model(0).items())
    leased = actor.open()
    assert leased.group(1) is not None
    transport.forget("actor-0")
    with pytest.raises(WeightsCorrupt, match="without having joined"):
        leased.send()
    assert actor.open().group(1) is not None, "as vLLM's workers are asked to"


def test_an_engine_that_did_not_meet_the_learner_tries_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(meeting: dict[str, Any], rank: int) -> ProcessGroup:
        return join_group({**meeting, "meet": str(place.path / "elsewhere")}, rank)

    learner, actor = place.learner(Broadcast("gloo", place.path, wait_s=1.0)), place.actor()
    learner.publish(0, 0, model(0).items())
    leased = actor.open()
    with monkeypatch.context() as patched:
        patched.setattr(subscriber, "join_group", elsewhere)
        with pytest.raises(WeightsCorrupt, match="not all of 2 processes came"):
            dict(leased.tensors())
    assert alike(dict(actor.open().tensors()), model(0))


def test_who_does_not_come_is_not_waited_for(place: Place) -> None:
    with pytest.raises(RunError, match="not all of 2 processes came"):
        ProcessGroup("gloo", place.path / "alone", 0, 2, wait_s=0.3)


# Channels.


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_actors_get_their_weights_by_broadcast(tmp_path: Path) -> None:
    fields = {
        "weights.channel": f"{Path(__file__).parent}/gloo_channel.py:Gloo", "actors.count": 2, "actors.slots": 32,
        "learner.steps": 4, "learner.groups-per-step": 4, "eval.tasks": 0, "launch.runs-dir": tmp_path,
        "launch.name": "run",
    }  # fmt: skip
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    config = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
    for command in (["launch", "--config", str(config), *words], ["audit", str(tmp_path / "run")]):
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl", *command], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("actor-*.log"))
    assert re.search(r"loaded weights 0\.[1-4]", logs)
