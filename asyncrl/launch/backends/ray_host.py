"""The Ray actor that holds the process of one role on a node, and ends with it.

launcher ──Ray──> RoleHost ── starts, the role's code unchanged ──> python -m asyncrl.actors RUN --name actor-0
                     │ holds the writing end of the process's lifeline: when Ray, the node or the launcher
                     │ ends by any cause, the process ends too; the host's guardian ends its descendants
                     ▼
              the role's output: into the run's log, and to Ray's own log of this actor
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ray

from asyncrl.errors import RunError
from asyncrl.launch.guardian import outlive
from asyncrl.launch.processes import HOSTED_MARKER, Process, Role, kill_all, of_run
from asyncrl.process import leftovers
from asyncrl.process.logs import RUN_ERROR
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import HOST

LOOK_S = 0.05
NODE_S = 0.5
SWEEP_S = 5.0


class RoleHost:
    """`wait` blocks until the process has ended; `stop` and `kill` come from other threads meanwhile."""

    def __init__(
        self, path: str, run_id: str, role: Role, environment: Mapping[str, str], cwd: str, again: bool
    ) -> None:
        self._process: Process | None = None
        self._why = ""
        self._turn = threading.Lock()
        self.node = ray.util.get_node_ip_address()
        threading.Thread(target=_end_with, args=(os.getppid(),), name="node", daemon=True).start()
        try:
            mark = uuid.uuid4().hex
            self._guarded = outlive(HOSTED_MARKER, mark)
            leftovers.remove()
            run = _same_run(Path(path), run_id)
            if Path(cwd).is_dir():  # the user's modules are found from the working folder
                os.chdir(cwd)
            # The role's own environment (threads) comes last and wins.
            local_role = replace(
                role,
                command=_by_this_python(role.command),
                again=_by_this_python(role.again),
                environment={**environment, HOST: self.node, HOSTED_MARKER: mark, **role.environment},
            )
            for folder in (run.sockets, run.shm):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                leftovers.lock(folder)
            self._process = Process(local_role, run_id, run.log(role.name), again=again)
            print(f"{role.name}: pid {self._process.pid} on {self.node}, log {self._process.log}", flush=True)
        except (OSError, subprocess.SubprocessError, RunError) as error:
            self._why = f"{role.name} cannot be started on {self.node}: {error}"

    def began(self) -> tuple[int, float, str]:
        """The pid, start time and node address; pid 0 when it did not start."""
        with self._turn:
            if self._process is None or self._process.ended() is not None:
                return 0, 0.0, self.node
            return *self._process.identity, self.node

    def wait(self) -> tuple[int, str]:
        """The exit code, and the reason where the log cannot tell it."""
        if self._process is None:
            return RUN_ERROR, self._why
        with self._process.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            code = None
            while code is None:
                with self._turn:
                    code = self._process.ended()
                if new := log.read():
                    sys.stdout.write(new.decode(errors="replace"))
                    sys.stdout.flush()
                time.sleep(LOOK_S)
        return code, self._process.killed_for

    def stop(self) -> None:
        if self._process is not None:
            with self._turn:
                self._process.stop()

    def kill(self, why: str) -> None:
        if self._process is not None:
            with self._turn:
                self._process.kill(why)


def _end_with(raylet: int) -> None:
    """Exits when the raylet is gone. Ray detects that itself only where orphans become children of process 1."""
    while os.getppid() == raylet:
        time.sleep(NODE_S)
    os._exit(1)


def sweep(run_id: str, folders: list[str]) -> int:
    """Ends the processes of the run on this node and removes its weights; gives the number of processes."""
    count = 0
    deadline = time.monotonic() + SWEEP_S
    while (left := of_run(run_id)) and time.monotonic() < deadline:
        count = max(count, len(left))
        kill_all(left)
        time.sleep(0.02)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return count


def _same_run(path: Path, run_id: str) -> RunFolder:
    """The run folder. Raises RunError when it is missing here, or holds another launch."""
    run = RunFolder.existing(path)
    if run.id != run_id:
        raise RunError(f"{path} holds another launch: the nodes must share the folder launch.runs_dir.")
    return run


def _by_this_python(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command with this node's interpreter, whose path may differ from the launcher's."""
    return (sys.executable, *command[1:]) if command[1:2] == ("-m",) else command
