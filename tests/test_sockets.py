"""Who has the run's keys gets through, over real sockets; who has not gets nothing."""

from __future__ import annotations

import ast
import asyncio
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from asyncrl.buffer.client import AsyncBufferClient, BufferClient
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.keys import Keys
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import Endpoint, Link, Listener, own_host
from asyncrl.tracking.collector import Collector
from asyncrl.tracking.reporter import Reporter

PACKAGE = Path(__file__).parents[1] / "asyncrl"
WAIT_MS = 5_000
NOTHING_MS = 700


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path / "run", Config.model_validate({"launch": {"host": "127.0.0.1"}}))
    yield folder
    folder.remove_temporary()


def link(where: Endpoint | str) -> Link[zmq.Socket[bytes]]:
    return Link(zmq.Context.instance(), zmq.DEALER, where, identity="test")


def got(listener: Listener, within_ms: int = WAIT_MS) -> bytes | None:
    return listener.socket.recv_multipart()[-1] if listener.socket.poll(within_ms) else None


def test_with_the_keys_of_the_run_one_gets_through(run: RunFolder) -> None:
    listener = Listener(zmq.ROUTER, run.address("buffer"), 1 << 20, {})
    assert run.address("buffer").now().startswith("tcp://127.0.0.1:")
    friend = link(run.address("buffer"))
    friend.socket.send(b"hello")
    assert got(listener) == b"hello"
    friend.close()
    listener.close()


def strangers(run: RunFolder) -> dict[str, Endpoint]:
    ours, theirs = run.address("buffer"), Keys.new()
    assert ours.keys is not None
    half = Keys(ours.keys.server_public, theirs.server_secret, theirs.client_public, theirs.client_secret)
    return {
        "other keys": Endpoint("buffer", announced=ours.announced, keys=theirs),
        "the server's public key alone": Endpoint("buffer", announced=ours.announced, keys=half),
        "no keys": Endpoint("buffer", address=ours.now()),
    }


def test_without_them_one_gets_nothing(run: RunFolder) -> None:
    listener = Listener(zmq.ROUTER, run.address("buffer"), 1 << 20, {})
    links = {name: link(end) for name, end in strangers(run).items()}
    for name, stranger in links.items():
        if stranger.socket.poll(NOTHING_MS, zmq.POLLOUT):
            stranger.socket.send(name.encode(), zmq.NOBLOCK)
    assert got(listener, NOTHING_MS) is None
    assert listener.refused >= 1
    assert not any(stranger.socket.poll(0) for stranger in links.values())
    friend = link(run.address("buffer"))
    friend.socket.send(b"still open for friends")
    assert got(listener) == b"still open for friends"
    for each in (*links.values(), friend):
        each.close()
    listener.close()


def test_a_peer_that_is_started_anew_is_found(run: RunFolder) -> None:
    friend = link(run.address("buffer"))
    assert not friend.socket.poll(50, zmq.POLLOUT), "nobody listens yet"
    for word in (b"first", b"second"):
        listener = Listener(zmq.ROUTER, run.address("buffer"), 1 << 20, {})
        friend.follow()
        friend.socket.send(word)
        assert got(listener) == word
        listener.close()


def test_a_frame_that_is_too_large_ends_its_connection_and_nothing_else(tmp_path: Path) -> None:
    listener = Listener(zmq.ROUTER, f"ipc://{tmp_path}/s", 1000, {})
    flood, friend = link(f"ipc://{tmp_path}/s"), link(f"ipc://{tmp_path}/s")
    flood.socket.send(b"x" * 1001)
    friend.socket.send(b"y" * 1000)
    assert got(listener) == b"y" * 1000
    assert got(listener, 300) is None
    for each in (flood, friend, listener):
        each.close()


class Counting:
    """A socket whose calls are counted."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self.calls = socket, 0

    def recv(self, *words: int, **named: bool) -> Any:
        self.calls += 1
        return self._socket.recv(*words, **named)

    def getsockopt(self, option: int) -> Any:
        self.calls += 1
        return self._socket.getsockopt(option)


def test_a_message_of_many_frames_costs_one_call_for_each(tmp_path: Path) -> None:
    """Every other peer waits while its frames are received: with two calls, of 100,000 frames, a second on a busy
    machine."""
    listener = Listener(zmq.ROUTER, f"ipc://{tmp_path}/s", 1000, {})
    flood, frames = link(f"ipc://{tmp_path}/s"), 3000
    flood.socket.send_multipart([b""] * frames)
    assert listener.socket.poll(WAIT_MS)
    counting = Counting(listener.socket)
    listener.socket = cast(Any, counting)
    assert len(listener.receive(2)) == 3, "the peer's name, and of the rest one more than is read"
    assert counting.calls == 1 + frames
    listener.socket = counting._socket
    flood.socket.send(b"next")
    assert got(listener) == b"next"
    for each in (flood, listener):
        each.close()


@pytest.mark.system
def test_a_buffer_that_was_killed_is_found_at_its_new_address(run: RunFolder) -> None:
    """By the blocking client, and by the one of an actor, in the middle of a call."""

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "asyncrl.buffer", str(run.path)], stderr=subprocess.DEVNULL)

    async def ask() -> list[str]:
        nonlocal process
        actor = AsyncBufferClient(run.address("buffer"), identity="actor-0", deadline_s=60.0)
        addresses = []
        for _ in range(2):
            assert (await actor.hello("actor")).version == 0
            addresses.append(run.address("buffer").now())
            process.kill()
            process.wait(10)
            process = start()
        await actor.hello("actor")
        await actor.close()
        return addresses

    process = start()
    client = BufferClient(run.address("buffer"), identity="test", deadline_s=60.0)
    try:
        assert client.status()["version"] == 0
        assert len(set(asyncio.run(ask()))) == 2
        assert client.status()["version"] == 0
    finally:
        client.close()
        process.kill()
        process.wait(10)


def test_reports_reach_the_launcher_over_tcp(run: RunFolder) -> None:
    collector = Collector(run, run.load_config())
    reporter = Reporter(run.address("launcher"), "actor-0", strict=True)
    reporter.ready()
    for _ in range(50):
        collector.poll(0.1)
        if collector.ready:
            break
    assert collector.ready == {"actor-0"}
    reporter.close()
    collector.close({})


def test_keys_are_the_owner_s_new_each_launch_and_gone_after_it(run: RunFolder) -> None:
    file = run.private / "keys"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.private.stat().st_mode) == 0o700
    first = Keys.load(file)
    secrets = [first.server_secret.decode(), first.client_secret.decode()]
    shown = (run.path / "run.json").read_text() + run.config.read_text() + repr(first) + repr(run.address("buffer"))
    assert not any(secret in shown for secret in secrets)
    run.open()
    assert Keys.load(file) != first
    file.chmod(0o644)
    with pytest.raises(RunError, match="can be read by others"):
        run.address("buffer")
    run.remove_temporary()
    with pytest.raises(RunError, match="has ended"):
        run.address("buffer")


def test_no_tcp_without_keys() -> None:
    with pytest.raises(RunError, match="keys"):
        link("tcp://127.0.0.1:1")
    with pytest.raises(RunError, match="keys"):
        Listener(zmq.ROUTER, "tcp://127.0.0.1:*", 1, {})


def test_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_host("10.1.2.3") == "10.1.2.3"
    assert own_host("auto").count(".") == 3
    monkeypatch.setenv("ASYNCRL_HOST", "10.9.9.9")
    assert own_host("auto") == "10.9.9.9"


UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
OBJECTS = re.compile(r"^((recv|send)_pyobj|(all_gather|broadcast|gather|scatter|recv|send)_object(_list)?)$")
"""Exchanges of Python objects, which zmq and torch.distributed pickle."""


def suspicious(tree: ast.AST) -> Iterator[str]:
    """What makes a socket, and what runs code out of bytes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in modules if name.split(".")[0] in UNPICKLERS)
            yield from (alias.name for alias in node.names if OBJECTS.search(alias.name))
        elif isinstance(node, ast.Attribute) and OBJECTS.search(node.attr):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and (made := ast.unparse(node.func)).endswith(".socket"):
            yield from [made] if "ontext" in made else []


def test_sockets_are_made_in_one_place_and_nothing_is_unpickled() -> None:
    bad = (
        "import pickle.x\nfrom dill import a\ns.recv_pyobj()\n"
        "zmq.Context.instance().socket(1)\nself._context.socket(1)\n"
        "dist.all_gather_object(a, b)\nfrom torch.distributed import broadcast_object_list\nf = dist.recv_object_list"
    )
    assert len(list(suspicious(ast.parse(bad)))) == 8, "a check of the check"
    files = [file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "sockets.py"]
    assert [f"{f.relative_to(PACKAGE)}: {w}" for f in files for w in suspicious(ast.parse(f.read_text()))] == []
