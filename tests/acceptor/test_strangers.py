"""Connections of strangers use up nothing that a role or its peers need: real processes, real limits of open files."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from asyncrl.buffer.client import BufferClient
from asyncrl.buffer.ledger.storage.database import Database, LedgerFailed
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import Link, Listener
from tests.acceptor.open_files import no_file_is_free
from tests.buffer.fakes import trajectory
from tests.waiting import until

STRANGERS = 2000

CONFIG = {
    "launch": {"host": "127.0.0.1"},
    "learner": {"groups_per_step": 2, "group_size": 2, "steps": 100_000},
    "buffer": {"capacity": 64, "max_staleness": 1},
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path / "run", Config.model_validate(CONFIG))
    yield folder
    folder.remove_temporary()


@pytest.fixture
def files() -> Iterator[None]:
    """This process may open as many files as the strangers need; CI gives it 1,024, as soft limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 2 * STRANGERS:
        pytest.skip(f"the hard limit of open files is {before[1]}, and the strangers need {2 * STRANGERS}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2 * STRANGERS), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Buffer:
    """A buffer process with its own limits of open files, and the learner and the actor that it serves."""

    def __init__(self, run: RunFolder, soft: int, hard: int) -> None:
        self.run, self.log = run, run.path / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.buffer", str(run.path)],
                stderr=log,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
            )
        self.learner, self.actor = self.client("learner"), self.client("actor-0")
        self.incarnation = self.learner.start(0, 0, None).incarnation
        self.learner.published(self.incarnation, 0, 0, "digest-0")
        self.b = 0

    def client(self, name: str) -> BufferClient:
        return BufferClient(self.run.address("buffer"), identity=name, deadline_s=30.0)

    def step(self) -> None:
        for ticket in self.actor.tickets("actor-0", (0, self.b), 8, [], 5.0).tickets:
            self.actor.put(trajectory(ticket, (self.b,), float(ticket.id.index)))
        assert self.learner.batch(self.incarnation, self.b, 0, 1, 20.0).state == "ready"
        self.b = self.learner.finished(self.incarnation, self.b, "applied")
        self.learner.published(self.incarnation, 0, self.b, f"digest-{self.b}")

    def connect(self, count: int) -> list[socket.socket]:
        host, port = self.run.address("buffer").now().removeprefix("tcp://").split(":")
        made = []
        for _ in range(count):
            made.append(socket.socket())
            made[-1].setblocking(False)
            made[-1].connect_ex((host, int(port)))
        return made

    @property
    def acceptor(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def close(self) -> None:
        self.learner.close()
        self.actor.close()
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def start(run: RunFolder) -> Iterator[Callable[[int, int], Buffer]]:
    started: list[Buffer] = []

    def make(soft: int = 1024, hard: int = 1024) -> Buffer:
        started.append(Buffer(run, soft, hard))
        return started[-1]

    yield make
    for buffer in started:
        buffer.close()


SAYS = {
    "nothing": b"",
    "that it speaks ZMTP": b"\xff" + bytes(8) + b"\x7f",
    "a greeting, and no more": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(54, b"\0"),
    "that it is a browser": b"GET / HTTP/1.1\r\n\r\n",
}


MORE = [(says, 1024) for says in list(SAYS)[1:]] + [("nothing", 20_000)]


@pytest.mark.parametrize(
    ("says", "hard"), [("nothing", 1024), *(pytest.param(*more, marks=pytest.mark.system) for more in MORE)]
)
def test_2000_strangers_neither_end_the_buffer_nor_keep_peers_away(
    start: Callable[..., Buffer], files: None, says: str, hard: int
) -> None:
    """Before, some 1,060 ended the run under a hard limit of 1,024, and the error blamed the disk."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"the hard limit of open files is below {hard}")
    buffer = start(1024, hard)
    strangers = buffer.connect(STRANGERS)
    for stranger in strangers:
        try:
            stranger.send(SAYS[says])
        except OSError:
            continue  # it was closed before, or is not connected yet
    for _ in range(20):
        buffer.step()
    late = buffer.client("late")
    assert late.hello("actor").version == buffer.b
    late.close()
    assert buffer.process.poll() is None
    assert psutil.Process(buffer.process.pid).num_fds() < 400
    assert until(lambda: "did not show the run's keys, most of them from 127.0.0.1" in buffer.log.read_text()), (
        "it is said"
    )
    for stranger in strangers:
        stranger.close()


def test_a_stranger_is_closed_soon(start: Callable[..., Buffer]) -> None:
    buffer = start()
    (stranger,) = buffer.connect(1)
    stranger.setblocking(True)
    stranger.settimeout(20.0)
    assert stranger.recv(1) == b""
    stranger.close()
    buffer.step()


def test_an_acceptor_that_is_killed_is_started_again_at_the_same_address(start: Callable[..., Buffer]) -> None:
    buffer = start()
    buffer.step()
    address, killed = buffer.run.address("buffer").now(), buffer.acceptor
    killed.kill()
    buffer.step()
    assert buffer.run.address("buffer").now() == address
    assert buffer.acceptor.pid != killed.pid
    assert "is started again" in buffer.log.read_text()


def test_an_acceptor_ends_with_its_role_and_leaves_no_folder(start: Callable[..., Buffer]) -> None:
    buffer = start()
    buffer.step()
    acceptor = buffer.acceptor
    folder = Path(acceptor.cmdline()[-1]).parent
    assert folder.is_dir()
    assert folder.parent == buffer.run.sockets
    buffer.process.kill()
    buffer.process.wait(10)
    assert until(lambda: not acceptor.is_running() or acceptor.status() == psutil.STATUS_ZOMBIE), "the acceptor ends"
    assert not folder.exists()


def test_large_messages_pass_unchanged_both_ways_also_to_a_slow_reader(run: RunFolder) -> None:
    listener = Listener(zmq.ROUTER, run.address("buffer"), 64 << 20, {})
    friend: Link[Any] = Link(zmq.Context.instance(), zmq.DEALER, run.address("buffer"), identity="test")
    sent = [os.urandom(size) for size in (0, 1, 1 << 10, 1 << 20, 40 << 20)]
    for data in sent:
        friend.socket.send(data)
    time.sleep(0.5)
    for data in sent:
        assert listener.socket.poll(20_000)
        peer, got = listener.socket.recv_multipart()
        assert got == data
    for data in sent:
        listener.socket.send_multipart([peer, data])
    time.sleep(0.5)
    assert all(friend.socket.poll(20_000) and friend.socket.recv() == data for data in sent)
    friend.close()
    listener.close()


def test_what_a_role_said_last_is_handed_over(run: RunFolder) -> None:
    listener = Listener(zmq.ROUTER, run.address("buffer"), 64 << 20, {zmq.LINGER: 2000})
    friend: Link[Any] = Link(zmq.Context.instance(), zmq.DEALER, run.address("buffer"), identity="test")
    friend.socket.send(b"?")
    peer, _ = listener.socket.recv_multipart()
    listener.socket.send_multipart([peer, b"x" * (8 << 20)])
    listener.close()
    assert friend.socket.poll(20_000)
    assert len(friend.socket.recv()) == 8 << 20
    friend.close()


@pytest.mark.system
def test_more_peers_than_files_are_refused_with_the_reason(start: Callable[..., Buffer]) -> None:
    buffer = start(96, 96)
    buffer.step()
    peers = [buffer.client(f"peer-{i}") for i in range(40)]
    assert until(lambda: "(ulimit -n): raise it" in buffer.log.read_text()), "the reason is said"
    buffer.step()
    for peer in peers:
        peer.close()


def test_a_ledger_that_may_open_no_file_blames_the_limit_not_the_disk(tmp_path: Path) -> None:
    database = Database(tmp_path / "a")
    database.set("x", "y")
    with no_file_is_free():
        for refused in (lambda: database.commit(float("inf")), lambda: Database(tmp_path / "b")):
            with pytest.raises(LedgerFailed, match=r"limit of \d+ open files and sockets; the disk is not.*ulimit -n"):
                refused()
    database.close()


def test_the_endpoint_of_a_host_without_the_launch_s_folder_has_one_of_its_own(run: RunFolder) -> None:
    end = replace(run.address("buffer"), folder=run.path / "none")
    listener = Listener(zmq.ROUTER, end, 1 << 20, {})
    friend: Link[Any] = Link(zmq.Context.instance(), zmq.DEALER, end, identity="test")
    friend.socket.send(b"hello")
    assert listener.socket.poll(10_000)
    friend.close()
    listener.close()
