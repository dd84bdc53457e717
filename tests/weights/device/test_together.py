"""One broadcast for all engines that ask at the same time, over gloo: who is in it, and what one that is slow, dies,
hangs or comes late costs the others. Engines are threads here, and processes where one of them is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.errors import RunError
from asyncrl.weights.device import publisher
from asyncrl.weights.device.gathering import Party
from asyncrl.weights.device.process_group import ProcessGroup
from asyncrl.weights.device.publisher import DevicePublisher
from asyncrl.weights.device.snapshot import DeviceSnapshot
from asyncrl.weights.device.subscriber import DeviceSubscriber, LeasedWeights
from asyncrl.weights.device.transports import Broadcast, Failed
from asyncrl.weights.protocol import WeightsCorrupt
from tests.waiting import until
from tests.weights.device.device_model import alike, model

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(120)


class Recorded(Broadcast):
    """The real one; it notes who was sent what together."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[tuple[str, ...]] = []
        self.met = 0

    def send(self, reader: str, snapshot: DeviceSnapshot, failed: Failed) -> None:
        self.sent.append((reader,))
        super().send(reader, snapshot, failed)

    def send_together(self, party: Party, snapshot: DeviceSnapshot, failed: Failed) -> Any:
        self.sent.append(tuple(sorted(asked.reader for asked in party)))
        before, meetings = self._meet, super().send_together(party, snapshot, failed)
        self.met += before != self._meet
        return meetings


class Stage:
    """A learner with one slot and engines that read on command, each in a thread."""

    def __init__(self, path: Path, together_s: float = 20.0) -> None:
        self.address = f"ipc://{path}/w"
        self.transport = Recorded("gloo", path, wait_s=30.0, together_s=together_s)
        self.learner = DevicePublisher(self.address, self.transport, CPU, slots=1, chunk_bytes=4096)
        self.engines: dict[str, DeviceSubscriber] = {}
        self.pool = ThreadPoolExecutor(8)

    def start(self, *names: str) -> None:
        for name in names:
            self.engines[name] = DeviceSubscriber(self.address, name, lambda: CPU)

    def publish(self, version: int) -> None:
        assert until(lambda: self.transport.free)
        self.transport.sent.clear()
        self.learner.publish(0, version, model(version).items())

    def read(self, version: int, *names: str, after: threading.Event | None = None) -> list[Future[bool]]:
        """Each opens the version, waits for `after`, and reads it: whether it got what was published."""

        def one(name: str) -> bool:
            leased = self.engines[name].open()
            assert leased.id.version == version
            assert after is None or after.wait(60)
            right = alike(dict(leased.tensors()), model(version))
            leased.close()
            return right

        return [self.pool.submit(one, name) for name in names]

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.learner.close()
        self.pool.shutdown()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(publisher, "GATHER_S", 3.0)  # threads of a busy machine
    made = Stage(tmp_path)
    yield made
    made.close()


def got(reading: list[Future[bool]], seconds: float = 60.0) -> bool:
    return all([each.result(seconds) for each in reading])


def test_engines_that_ask_at_the_same_time_get_one_broadcast_in_one_group(stage: Stage) -> None:
    stage.start("a", "b", "c")
    stage.publish(0)
    assert got(stage.read(0, "a", "b", "c"))
    for version in (1, 2, 3):
        stage.publish(version)
        assert got(stage.read(version, "a", "b", "c"))
        assert stage.transport.sent == [("a", "b", "c")], "once"
    assert stage.transport.met <= 2, "the group stays (the first version may have had one of two engines)"


def test_one_comes_late_and_one_leaves(stage: Stage) -> None:
    stage.start("a", "b")
    for version in (0, 1):
        stage.publish(version)
        assert got(stage.read(version, "a", "b"))
    stage.start("late")
    assert got(stage.read(1, "late"))
    assert stage.transport.sent == [("a", "b"), ("late",)], "what was gathered for is over"
    stage.publish(2)
    assert got(stage.read(2, "a", "b", "late"))
    assert stage.transport.sent == [("a", "b", "late")]
    stage.engines.pop("a").close()
    for version in (3, 4):
        stage.publish(version)
        assert got(stage.read(version, "b", "late"))
        assert stage.transport.sent == [("b", "late")]


def test_a_slow_one_is_waited_for_in_vain_once_and_gets_its_own_copy(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.start("a", "b", "slow")
    stage.publish(0)
    assert got(stage.read(0, "a", "b", "slow"))
    stage.learner._gathering._wait_s = 1.0
    stage.publish(1)
    go = threading.Event()
    slow = stage.read(1, "slow", after=go)
    assert got(stage.read(1, "a", "b")), "without it"
    assert stage.transport.sent == [("a", "b")]
    go.set()
    assert got(slow)
    assert stage.transport.sent == [("a", "b"), ("slow",)]
    stage.learner._gathering._wait_s = 3.0
    stage.publish(2)
    assert got(stage.read(2, "a", "b", "slow"))
    assert stage.transport.sent == [("a", "b", "slow")], "in time again"


def test_one_that_does_not_come_to_the_group_that_it_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had died between the learner's answer and the meeting."""
    monkeypatch.setattr(publisher, "GATHER_S", 3.0)
    monkeypatch.setattr(publisher, "FALL_BACK_S", 0.1)
    stage = Stage(tmp_path, together_s=1.0)
    try:
        stage.start("a", "b", "dying")
        stage.publish(0)
        assert got(stage.read(0, "a", "b", "dying"))
        stage.publish(1)
        leased = stage.engines["dying"].open()
        reading = stage.read(1, "a", "b")
        assert leased.send() is not None
        assert got(reading)
        assert stage.transport.sent == [("a", "b", "dying"), ("a",), ("b",)] or stage.transport.sent == [
            ("a", "b", "dying"), ("b",), ("a",),
        ]  # fmt: skip
        stage.engines.pop("dying").close()
        stage.publish(2)
        assert got(stage.read(2, "a", "b")), "in a group without it"
        assert stage.transport.sent == [("a", "b")]
    finally:
        stage.close()


# Processes.

SIZE = 4 << 20
CHUNKS = 6


def large(version: int) -> dict[str, torch.Tensor]:
    """One chunk for each tensor, larger than what a socket takes at once."""
    return {f"w{i}": torch.full((SIZE,), version * 10 + i, dtype=torch.uint8) for i in range(CHUNKS)}


def engine(address: str, name: str, told: Connection) -> None:
    """Reads each version that it is told to: all of it, or (`stops`) one chunk, and then waits to be killed."""
    torch.set_num_threads(1)
    actor = DeviceSubscriber(address, name, lambda: CPU)
    while (order := told.recv()) is not None:
        version, stops = order
        assert until(lambda v=version: (at := actor.latest()) is not None and at.version == v)  # type: ignore[misc]
        leased: LeasedWeights = actor.open()
        if stops:
            list(islice(actor.chunks(leased._terms, leased.layout), 1))
            told.send("has one chunk")
            signal.pause()
        try:
            told.send(alike(dict(leased.tensors()), large(version)))
        except WeightsCorrupt as error:
            told.send(str(error))
        leased.close()
    actor.close()


class Process:
    def __init__(self, address: str, name: str) -> None:
        self.pipe, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=engine, args=(address, name, there), daemon=True)
        self.process.start()

    def get(self, version: int, stops: bool = False) -> None:
        self.pipe.send((version, stops))

    def answer(self) -> Any:
        assert self.pipe.poll(60)
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


@pytest.mark.system
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_an_engine_lost_in_the_middle_of_a_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """The others get the rest by their own groups, then have a group without it; one that replaces it is taken in."""
    monkeypatch.setattr(publisher, "GATHER_S", 3.0)
    monkeypatch.setattr(publisher, "FALL_BACK_S", 0.1)
    address = f"ipc://{tmp_path}/w"
    transport = Recorded("gloo", tmp_path, wait_s=30.0, together_s=3.0)
    learner = DevicePublisher(address, transport, CPU, slots=1, chunk_bytes=SIZE)
    gone: list[Process] = []
    # The second of three: the learner sends to it, and it to the third.
    all_three = {name: Process(address, name) for name in ("a", "b", "c")}
    try:

        def publish(version: int, stops: str = "") -> None:
            assert until(lambda: transport.free)
            transport.sent.clear()
            learner.publish(0, version, large(version).items())
            for name, process in all_three.items():
                process.get(version, stops=name == stops)

        for version in (0, 1):
            publish(version)
            assert [process.answer() for process in all_three.values()] == [True] * 3
        assert transport.sent == [("a", "b", "c")]
        publish(2, stops="b")
        lost = all_three.pop("b")
        gone.append(lost)
        assert lost.answer() == "has one chunk"
        lost.signal(how)
        begun = time.monotonic()
        assert [process.answer() for process in all_three.values()] == [True] * 2
        assert time.monotonic() - begun < 30.0
        assert transport.sent[0] == ("a", "b", "c")
        assert sorted(transport.sent[1:]) == [("a",), ("c",)]
        publish(3)
        assert [process.answer() for process in all_three.values()] == [True] * 2
        assert transport.sent == [("a", "c")]
        all_three["regone"] = Process(address, "regone")
        all_three["regone"].get(3)
        assert all_three["regone"].answer() is True
        assert transport.sent == [("a", "c"), ("regone",)]
        publish(4)
        assert [process.answer() for process in all_three.values()] == [True] * 3
        assert transport.sent == [("a", "c", "regone")]
    finally:
        for process in (*all_three.values(), *gone):
            process.end()
        learner.close()


# What it stands on.


def test_a_group_whose_connecting_never_returns_is_left_behind() -> None:
    """As NCCL's does when a member has died; its fake here."""
    called, returns = threading.Event(), threading.Event()

    class Hanging:
        def broadcast(self, tensors: Any, options: Any) -> Any:
            called.set()
            returns.wait(60.0)
            return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

        def abort(self) -> None:
            raise AssertionError("a call that does not return has it")

    group: Any = ProcessGroup.__new__(ProcessGroup)
    group._group, group._wait_s, group._stream, group._connected, group._stuck = Hanging(), 0.1, None, False, False
    with pytest.raises(RunError, match="did not connect within"):
        group.send([torch.zeros(4, dtype=torch.uint8)])
    assert called.is_set()
    group.close()
    returns.set()
