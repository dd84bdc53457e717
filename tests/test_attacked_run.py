"""A live run, over tcp with keys or over ipc, while a peer sends every message of every socket: each number at, below
and beyond its bounds, and sizes from empty to beyond the limit. It trains on, no process grows, and others are served.

A peer with the keys is trusted: what only a role of the run may say (`stop`, `start`, what the learner reports of its
own incarnation) is sent beyond its bounds, and within them as of another incarnation.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from asyncrl.buffer.limits import DECLARED, Limits
from asyncrl.buffer.rules import Rules
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import Endpoint, Link
from asyncrl.tracking import messages as reports
from asyncrl.tracking.collector import MAX_BYTES
from asyncrl.tracking.sinks.jsonl import by_step
from asyncrl.weights.network.server import MAX_CHUNK_BYTES, MAX_REQUEST_BYTES
from asyncrl.wire import pack, unpack
from tests.buffer.client.test_limits import NUMBERS, filled
from tests.tracking.test_messages import EVENT, REPORT
from tests.waiting import until

ROOT = Path(__file__).parents[1]
FIELDS = {
    "learner.steps": 100_000, "learner.schedule": "constant", "actors.count": 1, "learner.groups_per_step": 4,
    "learner.group_size": 4, "buffer.capacity": 64, "buffer.lease_s": 5, "eval.tasks": 0, "launch.name": "run",
}  # fmt: skip
OVER_TCP = {"launch.host": "127.0.0.1", "weights.channel": "zmq"}
SIZES = (0, 1, 63, 255, 256, 4096, 65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 1, 16 << 20)
FRAME = 256 << 20
"""The buffer's largest."""
HUGE: tuple[Any, ...] = (2**63 - 1, 2**64 - 1, -(2**63), float("nan"), float("inf"), 1e308, True, "1", None, [])
GROWTH_MB = 150
SERVED_S = 1.0
Message = list[bytes]


def to_the_buffer(limits: Limits) -> Iterator[Message]:
    for request, place, least, most in NUMBERS:
        op = request.__struct_config__.tag
        named = [getattr(limits, bound) for at, bound in DECLARED[request] if at == place]
        top = min([most or 0, *named])
        within = [max(least or 0, 0), top - 1, top] if op not in ("start", "stop") else []
        for value in (*within, (least or 0) - 1, top + 1, *HUGE):
            if op == "start" and value is None:
                continue  # within: no branch
            fields = unpack(filled(request, place, value))
            if "incarnation" in fields and place != ("incarnation",):
                fields["incarnation"] = 0
            fields["actor"] = "fuzz"
            with contextlib.suppress(OverflowError):
                yield [pack(fields)]
    for size in SIZES:
        yield [bytes(size)]
        yield [pack({"op": "put", "n": 1}), bytes(size)]
        leases = [[{"branch": 0, "group": 0, "index": 0}, 0]] * min(size, 100_000)
        yield [pack({"op": "renew", "n": 1, "actor": "fuzz", "leases": leases})]
        yield [pack({"op": "status", "n": 1}), *[b""] * min(size, 100_000)]
    for size in (FRAME, FRAME + 1):
        yield [pack({"op": "put", "n": 1}), bytes(size)]


def to_a_server_of_weights(limits: Limits) -> Iterator[Message]:
    good: dict[str, Any] = {"op": "latest", "n": 1, "held": [-1, -1, ""], "full": False, "wait_s": 0.0}
    chunk = {"op": "chunk", "n": 1, "payload": "0-0-x", "offset": 0, "length": 1}
    for value in (-2, -1, 0, 2**31 - 1, 2**31, 2**53, 2**53 + 1, *HUGE):
        yield [pack(good | {"held": [value, -1, ""]})]
        yield [pack(good | {"held": [-1, value, ""]})]
        yield [pack(good | {"kept": [value, value, ""]})]
        yield [pack(good | {"n": value})]
    for value in (-1, 0, 0.1, 60, 60.1, *HUGE):
        yield [pack(good | {"wait_s": value})]
    for value in (-1, 0, 1, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1, *HUGE):
        yield [pack(chunk | {"length": value})]
        yield [pack(chunk | {"offset": value})]
    for length in (0, 1, 499, 500, 60_000):
        yield [pack({"op": "join", "n": 1, "relay": "ipc://" + "x" * length, "lost": ""})]
    for size in SIZES:
        yield [bytes(size)]
        for field in ("held", "kept"):
            yield [pack(good | {field: [-1, -1, "d" * min(size, MAX_REQUEST_BYTES)]})]
        yield [pack(good), *[b""] * min(size, 10_000)]


def to_the_launcher(limits: Limits) -> Iterator[Message]:
    of = {"role": "fuzz", "t": time.time(), "since": time.time()}
    for name, top in {**reports.BOUNDS, "step": limits.version}.items():
        for value in (0, top - 1, top, top + 1, -top, -top - 1, *HUGE):
            yield [pack(REPORT | of | {name: {"batch": value} if name == "waits" else value})]
    for many in (0, 1, reports.MAX_FIELDS, reports.MAX_FIELDS + 1, reports.MAX_VALUES, reports.MAX_VALUES + 1, 40_000):
        each = {str(i): i for i in range(many)}
        yield [pack(EVENT | of | {"event": "fuzzed", "fields": each})]
        yield [pack(REPORT | of | {"values": each})]
        yield [pack(REPORT | of | {"waits": each})]
    for size in SIZES:
        yield [bytes(min(size, MAX_BYTES + 1))]
        yield [pack(REPORT | of), *[b""] * min(size, 10_000)]


class Run:
    def __init__(self, folder: Path, fields: dict[str, Any]) -> None:
        words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
        self.folder = RunFolder(folder / "run")
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "launch", "--config", "configs/quickstart.yaml", *words,
             "--launch.runs-dir", str(folder)],
            cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def step(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return max((int(record.get("step") or 0) for record in by_step(self.folder.metrics)), default=0)
        return 0

    def processes(self) -> dict[str, psutil.Process]:
        roles = {name: psutil.Process(pid) for name, (pid, _) in self.folder.record()["processes"].items()}
        acceptors = {
            f"acceptor of {name}": child
            for name, process in [*roles.items(), ("launcher", psutil.Process(self.launcher.pid))]
            for child in process.children()
            if any("acceptor" in word for word in child.cmdline())
        }
        return roles | acceptors | {"launcher": psutil.Process(self.launcher.pid)}

    def listeners(self) -> dict[str, tuple[Endpoint, int, Callable[[Limits], Iterator[Message]]]]:
        """Of each socket: where it listens, the kind of its peers, what they send."""
        found = {
            "buffer": (self.folder.address("buffer"), zmq.DEALER, to_the_buffer),
            "launcher": (self.folder.address("launcher"), zmq.PUSH, to_the_launcher),
        }
        served = self.folder.address("weights")
        if served.announced is not None:
            for file in [served.announced, *self.folder.private.glob("weights-*")]:
                found[file.name] = (replace(served, announced=file), zmq.DEALER, to_a_server_of_weights)
            assert len(found) >= 4, f"the weights server and a relay listen: {list(found)}"
        return found

    def close(self) -> None:
        self.launcher.terminate()
        try:
            self.launcher.wait(120)
        finally:
            self.launcher.kill()
            self.launcher.wait(10)
            if self.folder.path.is_dir():
                kill_all(of_run(self.folder.id))
                self.folder.remove_temporary()


class Honest:
    """A peer that asks one socket every so often, and notes how long each answer takes.

    In a process of its own (honest_client.py): in this one it would wait while the attack packs its messages.
    """

    def __init__(self, run: RunFolder, listener: str, request: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.honest_client", str(run.path), listener, json.dumps(request)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.took: list[float] = []
        self.version = 0
        """The learner's, as the buffer says: a report to the launcher may say any."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            took, version = line.split()
            self.took.append(float(took))
            self.version = int(version)

    def stop(self) -> None:
        """Raises when it was left without an answer."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._reader.join(10)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


def attack(where: Endpoint, kind: int, messages: Iterator[Message], sent: dict[str, int]) -> None:
    """Sends all of them, and gives back the tickets that it gets. A connection that is closed for one is made again."""
    link: Link[Any] = Link(zmq.Context.instance(), kind, where, identity="fuzz", SNDTIMEO=2000, SNDHWM=100)
    for message in messages:
        with contextlib.suppress(zmq.Again):  # the connection was closed for the message before, and is made again
            link.socket.send_multipart(message)
            sent["messages"] += 1
            sent["bytes"] += sum(map(len, message))
        while kind == zmq.DEALER and link.socket.poll(5):
            answer = unpack(link.socket.recv_multipart()[0])
            if isinstance(reply := answer.get("reply"), dict) and reply.get("tickets"):
                leases = [[ticket["id"], ticket["attempt"]] for ticket in reply["tickets"]]
                release = {"op": "release", "n": 2**40 + sent["messages"], "actor": "fuzz", "leases": leases}
                link.socket.send(pack(release))
    time.sleep(0.5)
    link.close()


def megabytes(processes: dict[str, psutil.Process]) -> dict[str, int]:
    return {name: process.memory_info().rss >> 20 for name, process in processes.items()}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_a_run_under_every_message_trains_on_and_serves_others(tmp_path: Path, over: str) -> None:
    run = Run(tmp_path, FIELDS | (OVER_TCP if over == "tcp" else {}))
    honest: dict[str, Honest] = {}
    try:
        assert until(lambda: run.step() >= 5, 240), "the run begins to train"
        limits = Limits.of(Rules.of(run.folder.load_config()), (run.step(), run.step()), 0)
        processes, listeners = run.processes(), run.listeners()
        before = megabytes(processes)
        honest["buffer"] = Honest(run.folder, "buffer", {"op": "status"})
        if "weights" in listeners:
            latest = {"op": "latest", "held": [-1, -1, ""], "full": False, "wait_s": 0.0}
            honest["weights"] = Honest(run.folder, "weights", latest)
        assert until(lambda: honest["buffer"].version > 0), "it is answered"
        began = honest["buffer"].version
        sent = {"messages": 0, "bytes": 0}
        for where, kind, made in listeners.values():
            attack(where, kind, made(limits), sent)
            if where.keys is not None:
                strange: Any = zmq.Context.instance().socket(kind)  # without keys
                for option in (zmq.LINGER, zmq.SNDTIMEO):
                    strange.setsockopt(option, 0)
                strange.connect(where.now())
                time.sleep(0.2)
                for _, message in zip(range(500), made(limits), strict=False):
                    with contextlib.suppress(zmq.Again):
                        strange.send_multipart(message)
                assert not strange.poll(200), "a stranger gets no answer"
                strange.close(0)
        during = honest["buffer"].version
        assert during > began, "it trains meanwhile"
        assert until(lambda: honest["buffer"].version >= during + 3, 120), "it trains on"
        for each in honest.values():
            each.stop()
        after = megabytes(processes)
        took = {name: sorted(each.took) for name, each in honest.items()}
        told = {
            name: f"{len(t)} answers, median {t[len(t) // 2]:.3f}, 95% {t[len(t) * 95 // 100]:.3f}, most {t[-1]:.3f} s"
            for name, t in took.items()
        }
        print(f"\n{over}: {sent}, versions {began} to {during} meanwhile, MB before {before}, after {after}, {told}")
        assert sent["messages"] > 800
        assert run.launcher.poll() is None
        assert run.processes().keys() == processes.keys()
        assert all(process.is_running() for process in processes.values()), "none was started again"
        assert not [name for name in after if after[name] > before[name] + GROWTH_MB], (before, after)
        for name, times in took.items():
            assert times[len(times) * 95 // 100] < SERVED_S, f"{name}: {told[name]}"
    finally:
        for each in honest.values():
            each.kill()
        run.close()
    assert json.loads(run.folder.summary.read_text())["restarts"] == {}
