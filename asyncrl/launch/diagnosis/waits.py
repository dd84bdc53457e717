"""What the roles of a live run wait for, and `asyncrl why`, which explains it.

Every second the launcher writes what the roles report into a file beside the sockets, which `asyncrl why` reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from asyncrl.errors import AsyncRLError
from asyncrl.launch.backends.local import RoleProcess
from asyncrl.launch.diagnosis.why import RoleState, explain
from asyncrl.launch.preflight import living
from asyncrl.run_folder import RunFolder, replace
from asyncrl.tracking.bound_events import last_change
from asyncrl.tracking.sinks import jsonl
from asyncrl.tracking.slowest import slowest

if TYPE_CHECKING:
    from asyncrl.tracking.collector import Collector

WAITS_S = 1.0
"""Seconds between two notes of what the roles wait for."""
STATUS_S = 5.0
"""Seconds that the buffer has to answer."""


def role_states(processes: Mapping[str, RoleProcess], collector: Collector) -> list[RoleState]:
    """The state of each role, as it reports it and as the system sees its process."""
    ready, waiting, states = collector.ready, collector.waiting, []
    for name, process in processes.items():
        wait, pid = waiting.get(name), (process.identity or (0, 0.0))[0]
        cause, on = (wait.cause, wait.on) if wait else (None, "")
        for_s = wait.for_s if wait else collector.silent_s(name)
        state = process_state(pid) if process.local else "running"
        states.append(RoleState(name, pid if process.local else 0, name in ready, cause, on, for_s, state))
    return states


def process_state(pid: int) -> str:
    """`running`, `stopped` or `gone`; `running` for pid 0: a process on another host, or one without a pid yet."""
    if not pid:
        return "running"
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    return "gone" if status == psutil.STATUS_ZOMBIE else "running"


class WaitsFile:
    """What the roles wait for, for `asyncrl why`."""

    def __init__(self, run: RunFolder, processes: Mapping[str, RoleProcess], collector: Collector) -> None:
        self._run, self._processes, self._collector = run, processes, collector
        self._written = float("-inf")

    def write(self, now: float) -> None:
        """Writes the file, at most once per `WAITS_S`."""
        if now - self._written > WAITS_S:
            self._written = now
            write(self._run, role_states(self._processes, self._collector))


def write(run: RunFolder, states: Iterable[RoleState]) -> None:
    """Writes the states for `asyncrl why`. On a full disk the file keeps the former ones."""
    rows = [[s.name, s.pid, s.ready, s.cause, s.on, time.time() - s.for_s] for s in states]
    with contextlib.suppress(OSError):
        replace(_file(run), json.dumps(rows))


def read(run: RunFolder) -> list[RoleState]:
    """The states that the launcher wrote last; empty before the first ones."""
    try:
        rows = json.loads(_file(run).read_text())
    except FileNotFoundError:
        return []
    now = time.time()
    return [
        RoleState(name, pid, ready, cause, on, max(now - since, 0.0), process_state(pid))
        for name, pid, ready, cause, on, since in rows
    ]


def why(run: RunFolder) -> list[str]:
    """The lines that `asyncrl why` prints: who waits for whom, and at the end what would make the run faster, where its
    record says so."""
    advised = _advice(run)
    return [*_waiting(run), *last_change(run.path / "events.jsonl"), *[advised] * bool(advised)]


def _advice(run: RunFolder) -> str:
    """Empty also where the metrics cannot be read: who waits for whom is answered without them."""
    from asyncrl.tracking.advice import advice
    from asyncrl.tracking.sinks import jsonl

    try:
        return advice(jsonl.by_step(run.metrics), os.cpu_count())
    except (OSError, ValueError, KeyError):
        return ""


def _waiting(run: RunFolder) -> list[str]:
    alive = living(run).values()
    if "launcher" not in alive:
        if not run.ended:
            return [f"no process of {run.path} lives, and it left no summary: its launcher was killed"]
        return [_outcome(run)]
    if "buffer" not in alive and not run.record().get("host"):  # with a host, it may be on another one
        if run.ended:
            return [_outcome(run), "its launcher still draws the report's plots: Ctrl-C or SIGTERM leaves out the rest"]
        lines = list(explain(read(run), None).lines)
        return lines or ["of its processes only the launcher lives: the run is about to begin, or to end"]
    status, silence = buffer_status(run)
    lines = list(explain(read(run), status).lines) or ["no role has reported anything yet"]
    return [line for line in (*lines, silence, _slowest(run)) if line]


def _slowest(run: RunFolder) -> str:
    try:
        return slowest(jsonl.newest(run.metrics))
    except ValueError as error:
        return str(error)


def _outcome(run: RunFolder) -> str:
    ended: dict[str, Any] = json.loads(run.summary.read_text())
    return f"the run is over: {ended['outcome']}{': ' + ended['why'] if ended.get('why') else ''}"


def buffer_status(run: RunFolder) -> tuple[Mapping[str, object] | None, str]:
    """The buffer's status; None, and the reason, when it gives none."""
    from asyncrl.buffer.client import BufferClient

    try:
        client = BufferClient(run.address("buffer"), identity=f"why-{os.getpid()}", deadline_s=STATUS_S)
    except AsyncRLError as error:
        return None, str(error)
    try:
        return client.status(), ""
    except AsyncRLError as error:
        return None, str(error)
    finally:
        client.close()


def _file(run: RunFolder) -> Path:
    return run.sockets / "waits.json"
