"""Writes the stacks of all processes of a run, for a run that is stalled."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from asyncrl.launch.preflight import living
from asyncrl.launch.processes import of_run, role_of
from asyncrl.process.logs import STACKS
from asyncrl.run_folder import RunFolder

SPY_S = 5.0
"""Seconds that py-spy may take for one process."""
STACKS_S = 30.0
"""Seconds for the stacks of all processes; `launch.on_stall` waits for them."""


def start_writing(run: RunFolder, lines: Sequence[str]) -> threading.Thread:
    """Runs `write_stacks` in a thread: the launcher's loop continues meanwhile."""
    writing = threading.Thread(target=write_stacks, args=(run, lines), name="stacks", daemon=True)
    writing.start()
    return writing


def write_stacks(run: RunFolder, lines: Sequence[str]) -> None:
    """Makes each role write its stacks into its log. Where py-spy is installed and permitted, also writes the stacks of
    all processes into logs/stall.log, below `lines`, as far as `STACKS_S` allows. Writes nothing on a full disk."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    deadline = time.monotonic() + STACKS_S
    with contextlib.suppress(OSError), (run.logs / "stall.log").open("a") as file:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), *lines, sep="\n  ", file=file, flush=True)
        processes, names = of_run(run.id), living(run)
        named = [
            (process, f"{names.get(process.pid) or role_of(process)} (pid {process.pid})") for process in processes
        ]
        for process, name in named:
            if not _signal(process):
                print(f"{name}: handles no signal for its stacks", file=file)
        for process, name in named if spy else ():
            if time.monotonic() > deadline:
                print(f"no more stacks with py-spy: they took {STACKS_S:g} s", file=file)
                break
            print(f"{name}:\n{_spy(str(spy), process.pid)}", file=file, flush=True)


def _signal(process: psutil.Process) -> bool:
    """Asks for the stacks, if the process handles the signal: otherwise the signal would end it."""
    with contextlib.suppress(OSError, psutil.Error):
        caught = next(x for x in Path(f"/proc/{process.pid}/status").read_text().splitlines() if x.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (STACKS - 1) & 1:
            process.send_signal(signal.Signals(STACKS))
            return True
    return False


def _spy(spy: str, pid: int) -> str:
    try:
        done = subprocess.run(
            [spy, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=SPY_S
        )
    except subprocess.TimeoutExpired:
        return f"py-spy did not end within {SPY_S:g} s"
    return done.stdout if done.returncode == 0 else done.stderr.strip()
