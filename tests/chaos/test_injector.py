"""Each kind of fault by itself, on something smaller than a run."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.chaos.faults import disk
from asyncrl.chaos.faults.clock import Clock
from asyncrl.chaos.faults.disk import Disk
from asyncrl.chaos.faults.environment import EnvironmentLost, Environments, Frail
from asyncrl.chaos.faults.network import Relay
from asyncrl.chaos.faults.processes import Processes
from asyncrl.chaos.plan import Fault
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.processes import RUN_MARKER
from asyncrl.plugins import resolve
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import direct
from tests.waiting import until


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that says everything again."""

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1024):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_a_link_is_cut_silent_and_slow_and_then_as_before(tmp_path: Path, echo: int) -> None:
    run = RunFolder(tmp_path)
    run.private.mkdir()
    direct(run.private / "buffer").write_text(f"tcp://127.0.0.1:{echo}")
    relay = Relay(seed=0)
    relay.open(run)
    try:
        shown = run.private / "buffer"
        assert until(shown.exists)
        host, _, port = shown.read_text().removeprefix("tcp://").rpartition(":")
        assert (host, int(port) != echo) == ("127.0.0.1", True)
        faults = {mode: Fault(0.0, "net", "connections to buffer", 1.0, mode) for mode in ("cut", "silent", "slow")}
        assert relay.ready(faults["cut"])
        assert not relay.ready(Fault(0.0, "net", "connections to weights", 1.0, "cut"))
        with socket.create_connection((host, int(port)), 20.0) as link:
            assert said(link, b"one") == b"one"
            relay.begin(faults["silent"])
            link.settimeout(0.3)
            with pytest.raises(TimeoutError):
                said(link, b"two")
            relay.end(faults["silent"])
            link.settimeout(20.0)
            assert link.recv(16) == b"two", "what was held back arrives"
            relay.begin(faults["slow"])
            began = time.monotonic()
            assert said(link, b"three") == b"three"
            assert time.monotonic() - began > 0.01
            relay.end(faults["slow"])
            relay.begin(faults["cut"])
            assert until(lambda: is_closed(link))
        relay.end(faults["cut"])

        def answers() -> bool:
            with socket.create_connection((host, int(port)), 20.0) as again:
                return said(again, b"five") == b"five"

        assert until(answers)
        shown.unlink()  # a launch that is resumed has a new folder
        assert until(shown.exists)
    finally:
        relay.close()


def is_closed(link: socket.socket) -> bool:
    try:
        return said(link, b"four") == b""
    except ConnectionError:
        return True


def said(link: socket.socket, words: bytes) -> bytes:
    link.sendall(words)
    return link.recv(16)


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
def test_a_clock_is_set_for_processes_that_run_and_the_monotonic_one_is_not() -> None:
    clock = Clock()
    try:
        code = "import time\nfor _ in iter(input, ''): print(time.time(), time.monotonic(), flush=True)"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **clock.environment},
        )  # fmt: skip
        offsets = []
        for offset in (0.0, 1800.0, -1800.0):
            clock.begin(Fault(0.0, "clock", "clock", offset_s=offset))
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("now\n")
            process.stdin.flush()
            day, monotonic = map(float, process.stdout.readline().split())
            assert abs(monotonic - time.monotonic()) < 60.0
            offsets.append(round((day - time.time()) / 60.0))
        process.communicate("\n", timeout=10)
        assert offsets == [0, 30, -30]
    finally:
        clock.close()


def lookup(tmp_path: Path) -> Config:
    return Config.model_validate(
        {"env": {"name": "lookup"}, "launch": {"runs_dir": str(tmp_path), "name": "run"}, "eval": {"tasks": 0}}
    )


def test_environments_under_way_are_lost_and_later_ones_are_not(tmp_path: Path) -> None:
    config = lookup(tmp_path)
    injector = Environments(config)
    changed = injector.changed(config).env
    run = RunFolder.create(tmp_path / "run", config)
    injector.open(run)
    assert resolve(changed.name, {}, "env.name") is Frail
    Frail.check(changed.options)
    task = {"id": "t", "prompt": "p", "keys": ["a", "b"], "store": {"a": 1, "b": 2}, "operator": "+", "answer": 3}
    before = Frail(**changed.options)
    injector.begin(Fault(1.0, "env", "environment"))
    with pytest.raises(EnvironmentLost):
        asyncio.run(before.step({"role": "assistant", "content": "3"}))
    after = Frail(**changed.options)
    assert asyncio.run(_plays(after, task))
    injector.close()
    assert list(tmp_path.glob("*.env-lost")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="roles are forked on Linux alone")
def test_processes_below_a_forked_actor_are_found(tmp_path: Path) -> None:
    config = lookup(tmp_path)
    injector, run = Environments(config), RunFolder.create(tmp_path / "run", config)
    injector.changed(config)
    injector.open(run)
    # The kernel shows no role for what was forked.
    shells = [
        subprocess.Popen(
            ["sh", "-c", "sleep 60 & wait"], env={**os.environ, RUN_MARKER: run.id}, start_new_session=True
        )
        for _ in range(2)
    ]
    try:
        actor, buffer = (psutil.Process(shell.pid) for shell in shells)
        assert until(lambda: bool(actor.children() and buffer.children()))
        roles = {"actor-0": actor, "buffer": buffer}
        run.note(processes={name: [role.pid, role.create_time()] for name, role in roles.items()})
        assert injector._started() == actor.children()
    finally:
        for shell in shells:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        injector.close()


async def _plays(env: Frail, task: dict[str, object]) -> bool:
    try:
        await env.reset(task)
        await env.step({"role": "assistant", "content": "3", "last": True})
    except EnvironmentLost:
        return False
    finally:
        await env.close()
    return True


def test_a_process_that_is_gone_in_the_last_moment_is_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid is then 0, which for the kernel is the group of whoever signals."""
    run = RunFolder.create(tmp_path / "run", Config())
    run.note(processes={"actor-0": [2**22, 1.0]})
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: signalled.append(pid))
    processes = Processes(Config())
    processes.open(run)
    for kind in ("actor", "stop"):
        fault = Fault(0.0, kind, "actor-0")
        processes.begin(fault)
        processes.end(fault)
    assert signalled == []
    run.remove_temporary()


def test_an_agent_beside_an_engine_with_processes_is_refused() -> None:
    config = Config.model_validate({"env": {"name": f"{__name__}:agent"}, "actors": {"engine": "vllm"}})
    with pytest.raises(ConfigError, match=r"--kill env: env.name is .* an agent"):
        Environments(config)


async def agent(task: dict[str, object], client: object) -> float:
    return 0.0


def test_a_disk_of_its_own_needs_root_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"--kill disk-full mounts a disk of its own .* and this user is not"):
        Disk("disk-full")


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/loop-control").exists(), reason="mounts are root's")
def test_a_disk_is_full_and_slow_and_its_content_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SIZE_BYTES", 64 << 20)
    own = Disk("disk-full")
    run = RunFolder(tmp_path / "run")
    own.open(run)
    try:
        file = run.path / "file"
        file.write_bytes(b"x" * 1000)
        full, slow = Fault(0.0, "disk-full", "disk", 1.0), Fault(0.0, "disk-slow", "disk", 1.0)
        own.begin(full)
        with pytest.raises(OSError, match="No space left"):
            (run.path / "other").write_bytes(b"y" * 100_000)
        own.end(full)
        file.write_bytes(b"x" * 100_000)
        own.begin(slow)
        began, stood_s = time.monotonic(), 0.0
        while time.monotonic() - began < 1.0:
            last = time.monotonic()
            with file.open("ab") as stream:
                stream.write(b"z")
            stood_s = max(stood_s, time.monotonic() - last)
        own.end(slow)
        assert stood_s > 0.2
        size = file.stat().st_size
    finally:
        own.close()
    assert not run.path.is_mount()
    assert (run.path / "file").stat().st_size == size
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
