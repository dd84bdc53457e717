"""What an acceptor process does with one connection: every byte, in order, until both ends are closed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.acceptor import AcceptorProcess
from asyncrl.acceptor.__main__ import READY
from tests.acceptor.open_files import no_file_is_free
from tests.waiting import until

ZMTP = b"\xff"


def test_what_a_role_said_last_reaches_a_slow_peer_that_still_speaks(role: Role) -> None:
    """Before, its connection was closed as broken; peers of ZeroMQ speak every few seconds."""
    peer, there = role.connection()
    sent = fill(there, 64 << 20)
    there.close()
    peer.send(b"are you there?")
    time.sleep(0.5)
    assert read_all(peer) == sent
    peer.close()


class Role:
    """A plain socket in the place of ZeroMQ's, behind a real acceptor process."""

    def __init__(self, folder: Path, most: int = 1 << 30) -> None:
        self.acceptor = AcceptorProcess("role", "127.0.0.1", folder, most)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.acceptor.path))
        self._listening.listen()
        self._listening.settimeout(20.0)
        self.acceptor.open()

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self.acceptor._process is not None
        return self.acceptor._process

    def peer(self) -> socket.socket:
        host, port = self.acceptor.address.removeprefix("tcp://").split(":")
        return socket.create_connection((host, int(port)), timeout=20.0)

    def accept(self) -> socket.socket:
        taken = self._listening.accept()[0]
        taken.settimeout(20.0)
        return taken

    def connection(self) -> tuple[socket.socket, socket.socket]:
        """(the peer's end, the role's end)"""
        peer = self.peer()
        peer.send(ZMTP)
        role = self.accept()
        assert role.recv(1) == ZMTP
        role.send(READY)  # it is admitted
        assert peer.recv(len(READY)) == READY
        return peer, role

    def close(self) -> None:
        self._listening.close()
        self.acceptor.close()


@pytest.fixture
def role() -> Iterator[Role]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = Role(Path(folder))
        yield made
        made.close()


def test_an_acceptor_that_cannot_be_started_again_is_tried_until_it_can(
    role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, the thread that starts it ended with the first error, and nothing took connections any more."""
    killed = role.process
    with no_file_is_free():
        killed.kill()
        assert until(lambda: "Too many open files" in caplog.text), "it is said"
        time.sleep(0.5)
        assert role.process is killed
    assert caplog.text.count("Too many open files") == 1
    peer, there = role.connection()
    there.send(b"hello")
    assert peer.recv(5) == b"hello"
    peer.close()
    there.close()


def test_an_acceptor_that_is_started_while_its_role_closes_is_ended_too(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, start, closing = threading.Event(), role.acceptor._start, role.acceptor._closing

    def late() -> subprocess.Popen[str]:
        starts.set()
        assert closing.wait(20.0)
        return start()

    monkeypatch.setattr(role.acceptor, "_start", late)
    killed = role.process
    killed.kill()
    assert starts.wait(20.0)
    role.close()
    assert until(lambda: not role.acceptor._thread.is_alive()), "the thread ends"
    assert role.process is not killed
    assert role.process.wait(20.0) == 0, "it ended by itself, and was not killed"


def fill(end: socket.socket, most: int) -> bytes:
    """What `end` sent, until it can send no more at once."""
    end.setblocking(False)
    data, sent = os.urandom(most), 0
    with contextlib.suppress(BlockingIOError):
        while sent < most:
            sent += end.send(data[sent : sent + (1 << 16)])
            time.sleep(0.002)
    return data[:sent]


def read_all(end: socket.socket) -> bytes:
    data = bytearray()
    while part := end.recv(1 << 16):
        data += part
    return bytes(data)


@contextlib.contextmanager
def stopped(process: subprocess.Popen[str]) -> Iterator[None]:
    """Events that come meanwhile are handled at once, in their order."""
    process.send_signal(signal.SIGSTOP)
    assert until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED), "it stops"
    yield
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("clogged", [False, True])
def test_an_event_of_a_closed_connection_does_not_close_the_next_one_with_its_file(role: Role, clogged: bool) -> None:
    """`clogged`: the event says that more can be written. Before, it ended the process."""
    broken, there = role.connection()
    process = role.process
    if clogged:
        fill(there, 64 << 20)
        fill(broken, 64 << 20)
    with stopped(role.process):
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        broken.close()  # with a reset, at which both files of the connection are closed
        peers = [role.peer() for _ in range(4)]  # the first two get their numbers
        if clogged:
            with contextlib.suppress(BlockingIOError):
                while there.recv(1 << 20):
                    pass
        else:
            there.send(b"hello")
    for peer in peers:
        time.sleep(0.1)
        peer.send(ZMTP)
        taken = role.accept()
        assert taken.recv(1) == ZMTP
        taken.close()
        peer.close()
    there.close()
    assert role.process is process
    assert process.poll() is None


def test_an_acceptor_that_waits_for_a_slow_reader_uses_no_processor(role: Role) -> None:
    """Before, it took a whole core until the peer had read."""
    peer, there = role.connection()
    assert len(fill(there, 64 << 20)) < 64 << 20
    there.close()
    time.sleep(0.5)
    acceptor = psutil.Process(role.process.pid)
    before, began = sum(acceptor.cpu_times()[:2]), time.monotonic()
    time.sleep(1.0)
    assert sum(acceptor.cpu_times()[:2]) - before < 0.1 * (time.monotonic() - began)
    peer.close()


@pytest.mark.parametrize("slow", ["peer", "role"])
def test_what_was_sent_before_the_end_arrives_whole_at_a_slow_reader(role: Role, slow: str) -> None:
    """Before, what had been read since replaced what the peer had not taken yet."""
    peer, there = role.connection()
    reader, writer = (peer, there) if slow == "peer" else (there, peer)
    sent = fill(writer, 64 << 20)
    writer.close()
    time.sleep(0.5)
    assert read_all(reader) == sent
    reader.close()
