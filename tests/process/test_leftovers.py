"""Folders of launches of which nothing lives: removed, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from asyncrl.config import Config
from asyncrl.process import leftovers
from asyncrl.run_folder import RunFolder
from tests.waiting import until

HOLD = """
import sys, time
from pathlib import Path
from asyncrl.process import leftovers
leftovers.lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def folder(parent: Path, name: str, age_s: float = 2 * leftovers.STALE_S, lock: bool = True) -> Path:
    made = parent / name
    made.mkdir()
    (made / "weights").write_bytes(b"x")
    if lock:
        (made / leftovers.LOCK).touch()
    then = time.time() - age_s
    os.utime(made, (then, then))
    return made


def test_only_what_nobody_holds_is_removed(tmp_path: Path) -> None:
    left = folder(tmp_path, "asyncrl-left")
    new, foreign = folder(tmp_path, "asyncrl-new", age_s=0.0), folder(tmp_path, "asyncrl-other", lock=False)
    used = folder(tmp_path, "asyncrl-used")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(used)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert leftovers.remove([tmp_path]) == [left]
        assert (left.exists(), new.exists(), foreign.exists(), used.exists()) == (False, True, True, True)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(10)
        assert until(lambda: leftovers.remove([tmp_path]) == [used]), "the kernel lets go of a dead process's lock"
    finally:
        holder.kill()
        holder.communicate(timeout=10)


def test_a_run_folder_s_own_are_held_while_its_process_lives(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    for made in (run.sockets, run.shm):
        then = time.time() - 2 * leftovers.STALE_S
        os.utime(made, (then, then))
    leftovers.remove()
    assert (run.sockets.exists(), run.shm.exists()) == (True, True)
    sockets = run.sockets
    run.remove_temporary()
    assert not sockets.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from asyncrl.process import leftovers
with leftovers.in_memory("server", Path(sys.argv[1])) as folder:
    (folder / "model.safetensors").write_bytes(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_an_actor_that_was_killed_had_written_for_its_engine_is_removed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    (left,) = tmp_path.iterdir()
    assert leftovers.remove([tmp_path]) == [], "nothing that is new"
    then = time.time() - 2 * leftovers.STALE_S
    os.utime(left, (then, then))
    assert leftovers.remove([tmp_path]) == [left]
