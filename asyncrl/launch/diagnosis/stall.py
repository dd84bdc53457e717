"""What a live run's processes are doing, as seen from outside: their waits, their state, their stacks.

The launcher leaves what the roles told it in a file beside the sockets, every second; `asyncrl why` reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from asyncrl.errors import AsyncRLError
from asyncrl.launch.diagnosis.why import Explanation, RoleState, explain
from asyncrl.launch.preflight import living
from asyncrl.launch.processes import of_run, role_of
from asyncrl.process.logs import STACKS
from asyncrl.run_folder import RunFolder, replace

PATIENCE_S = 5.0
"""For the buffer's status, and for one process's stacks."""
STACKS_S = 30.0
"""For all stacks together; `launch.on_stall` waits for them."""
NOTE_S = 1.0
"""Between two notes of the roles' waits."""


def note_path(run: RunFolder) -> Path:
    return run.sockets / "waits.json"


def note(run: RunFolder, states: Iterable[RoleState]) -> None:
    """Leaves what the roles said for `asyncrl why`. Raises OSError."""
    said = [[s.name, s.pid, s.ready, s.cause, s.on, time.time() - s.for_s] for s in states]
    replace(note_path(run), json.dumps(said))


def noted(run: RunFolder) -> list[RoleState]:
    """Empty: no launcher has noted anything."""
    try:
        said = json.loads(note_path(run).read_text())
    except FileNotFoundError:
        return []
    now = time.time()
    return [
        RoleState(name, pid, ready, cause, on, max(now - since, 0.0), process_state(pid))
        for name, pid, ready, cause, on, since in said
    ]


def process_state(pid: int) -> str:
    """`running`, `stopped` or `gone`; of a process on another host, or one without pid yet, `running`."""
    if not pid:
        return "running"
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    return "gone" if status == psutil.STATUS_ZOMBIE else "running"


def why(run: RunFolder) -> list[str]:
    """What `asyncrl why` prints."""
    there = living(run)
    if "launcher" not in there.values():
        if not run.summary.is_file():
            return [f"no process of {run.path} lives, and it left no summary: its launcher was killed"]
        ended: dict[str, Any] = json.loads(run.summary.read_text())
        return [f"the run is over: {ended['outcome']}{': ' + ended['why'] if ended.get('why') else ''}"]
    if "buffer" not in there.values() and not run.record().get("host"):  # with a host, it may be on another one
        said = list(explain(noted(run), None).lines)
        return said or ["of its processes only the launcher lives: the run is about to begin, or to end"]
    status, silence = buffer_status(run)
    lines = list(explain(noted(run), status).lines) or ["no role has said anything yet"]
    return [*lines, silence] if silence else lines


def buffer_status(run: RunFolder) -> tuple[Mapping[str, object] | None, str]:
    """The buffer's account of itself; else None and why not."""
    from asyncrl.buffer.client import BufferClient

    try:
        client = BufferClient(run.address("buffer"), identity=f"why-{os.getpid()}", deadline_s=PATIENCE_S)
    except AsyncRLError as error:
        return None, str(error)
    try:
        return client.status(), ""
    except AsyncRLError as error:
        return None, str(error)
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class Stall:
    """The run stands still, and the stacks of its processes are being written: the launcher goes on meanwhile."""

    blamed: tuple[str, ...]
    text: str
    since: float
    """The progress after which nothing came."""
    writing: threading.Thread

    @classmethod
    def begin(cls, run: RunFolder, explanation: Explanation, text: str, since: float) -> Stall:
        writing = threading.Thread(target=write_stacks, args=(run, explanation), name="stacks", daemon=True)
        writing.start()
        return cls(explanation.blamed, text, since, writing)


def write_stacks(run: RunFolder, explanation: Explanation) -> None:
    """Every process's stacks: a role's own into its log, with py-spy, where it is installed and allowed, those of all
    processes, as many as `STACKS_S` allows, into logs/stall.log. On a full disk none."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    deadline = time.monotonic() + STACKS_S
    with contextlib.suppress(OSError), (run.logs / "stall.log").open("a") as file:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), *explanation.lines, sep="\n  ", file=file, flush=True)
        processes = of_run(run.id)
        for process in processes:
            if not _signal(process):
                print(f"{role_of(process)} (pid {process.pid}): takes no signal for its stacks", file=file)
        for process in processes if spy else ():
            if time.monotonic() > deadline:
                print(f"no more stacks with py-spy: they took {STACKS_S:g} s", file=file)
                break
            print(f"{role_of(process)} (pid {process.pid}):\n{_spy(str(spy), process.pid)}", file=file, flush=True)


def _signal(process: psutil.Process) -> bool:
    """Asks for the stacks, if the process has said what to do when asked: else the signal would end it."""
    with contextlib.suppress(OSError, psutil.Error):
        caught = next(x for x in Path(f"/proc/{process.pid}/status").read_text().splitlines() if x.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (STACKS - 1) & 1:
            process.send_signal(signal.Signals(STACKS))
            return True
    return False


def _spy(spy: str, pid: int) -> str:
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return f"py-spy did not end within {PATIENCE_S:g} s"
    return done.stdout if done.returncode == 0 else done.stderr.strip()
