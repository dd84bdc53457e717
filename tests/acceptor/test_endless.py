"""A message without an end, from a peer with the keys: ZeroMQ gathers its parts, and nobody receives any."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from asyncrl.acceptor.__main__ import FRAME_BYTES, GREETING_BYTES, LARGE, STUCK_S, Frames
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import Link, Listener
from tests.acceptor.test_connections import Role
from tests.waiting import until

MOST = 16 << 20
EVIL = """
import sys, time, zmq
from pathlib import Path
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import Link
path, kind, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
link = Link(zmq.Context.instance(), kind, RunFolder(path).address("buffer"), identity="evil", SNDHWM=0)
for _ in range(size >> 16):
    link.socket.send(bytes(1 << 16), zmq.SNDMORE)
link.socket.send(b"")
print(1, flush=True)
time.sleep(100)
"""
CONFIG = {"launch": {"host": "127.0.0.1"}}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path / "run", Config.model_validate(CONFIG))
    yield folder
    folder.remove_temporary()


def link(run: RunFolder, kind: int, name: str) -> Link[Any]:
    return Link(zmq.Context.instance(), kind, run.address("buffer"), identity=name, SNDHWM=0)


def received(listener: Listener, count: int, seconds: float = 40.0) -> list[list[bytes]]:
    """What comes, until so many have come or the time is over."""
    messages: list[list[bytes]] = []
    deadline = time.monotonic() + seconds
    while len(messages) < count and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(zmq.Again):  # a poll may say that there is one when it was rolled back
            if listener.socket.poll(int(left * 1000)):
                messages.append([frame.bytes for frame in listener.receive(8)])
    return messages


@pytest.mark.parametrize(("kind", "peers"), [(zmq.ROUTER, zmq.DEALER), (zmq.PULL, zmq.PUSH)])
def test_a_message_that_is_too_large_is_not_gathered_and_others_are_served(
    run: RunFolder, kind: int, peers: int
) -> None:
    """Before, memory alone was its end: ZeroMQ bounds one part, and the parts of a message have no bound."""
    listener = Listener(kind, run.address("buffer"), 1 << 20, {})
    honest = link(run, peers, "honest")
    honest.socket.send(b"first")
    assert len(received(listener, 1)) == 1
    before = psutil.Process().memory_info().rss
    evil = subprocess.Popen(
        [sys.executable, "-c", EVIL, str(run.path), str(int(peers)), str(20 * MOST)], stdout=subprocess.PIPE
    )
    assert evil.stdout is not None
    assert evil.stdout.read(1)
    for i in range(20):
        honest.socket.send(b"%d" % i)
    got = received(listener, 20)
    assert [message[-1] for message in got] == [b"%d" % i for i in range(20)]
    assert received(listener, 1, 4.0) == []
    assert psutil.Process().memory_info().rss - before < 5 * MOST
    evil.kill()
    evil.communicate()
    honest.close()
    listener.close()


@pytest.mark.parametrize("size", [0, 10, 220, 230, 5000, 300_000])
def test_a_peer_whose_messages_are_received_may_send_for_ever(run: RunFolder, size: int) -> None:
    """What the acceptor counts is what the role counts, whatever the size: else it would stop after a while."""
    listener = Listener(zmq.ROUTER, run.address("buffer"), 1 << 20, {})
    peer = link(run, zmq.DEALER, "honest")
    frames = 4
    each = frames * (size + 33 + FRAME_BYTES)
    count, got = 6 * MOST // each, 0
    for _ in range(count):
        peer.socket.send_multipart([bytes(size)] * frames)
    deadline = time.monotonic() + 60.0
    while got < count and time.monotonic() < deadline:
        if listener.socket.poll(100):
            assert len(listener.receive(8)) == 1 + frames
            got += 1
    assert got == count
    peer.close()
    listener.close()


def test_a_message_of_many_frames_is_discarded_and_counted(run: RunFolder) -> None:
    listener = Listener(zmq.ROUTER, run.address("buffer"), 1 << 20, {})
    peer = link(run, zmq.DEALER, "honest")
    for _ in range(20):
        peer.socket.send_multipart([b""] * 2000)
    assert [len(message) for message in received(listener, 20)] == [9] * 20
    peer.close()
    listener.close()


@pytest.mark.system
def test_a_peer_that_stays_too_large_is_closed_and_the_reason_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    role = Role(tmp_path, MOST)
    peer, there = role.connection()
    other, there_too = role.connection()
    peer.sendall(bytes(GREETING_BYTES - 1) + bytes([LARGE]) + (1 << 40).to_bytes(8, "big"))
    peer.setblocking(False)
    there.settimeout(4.0)
    took, began = 0, time.monotonic()
    with contextlib.suppress(TimeoutError):
        while took < 8 * MOST:
            with contextlib.suppress(BlockingIOError):
                peer.send(bytes(1 << 20))
            took += len(there.recv(1 << 20))
    assert MOST / 2 < took < 2 * MOST, "it is not read from any more"
    there.settimeout(STUCK_S + 15.0)
    with contextlib.suppress(ConnectionResetError):
        assert there.recv(1) == b"", "it is closed"
    assert time.monotonic() - began > STUCK_S
    assert until(lambda: "a message without an end" in caplog.text)
    other.sendall(b"hello")
    assert there_too.recv(5) == b"hello"
    for each in (peer, there, other, there_too):
        each.close()
    role.close()


def test_frames_are_counted_however_their_bytes_are_cut() -> None:
    rng = random.Random(0)
    sizes = [rng.choice([0, 1, 40, 255, 256, 70_000]) for _ in range(200)]
    stream = bytes(64) + b"".join(
        (b"\x02" + size.to_bytes(8, "big") if size > 255 else bytes([0, size])) + bytes(size) for size in sizes
    )
    for cut in (1, 2, 3, 7, 64, 1000, len(stream)):
        part = stream[: 20_000 * cut]
        counter = Frames()
        count = sum(counter.begin(part[at : at + cut]) for at in range(0, len(part), cut))
        whole = Frames()
        assert count == whole.begin(part)
    assert Frames().begin(stream) == len(sizes)
