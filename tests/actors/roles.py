"""Real processes of a run, where a test plays the others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import TracebackType

from asyncrl.buffer.client import BatchReply, BufferClient
from asyncrl.run_folder import RunFolder

Process = subprocess.Popen[bytes]


class Roles:
    """None of them is left at the end."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._started: list[tuple[str, Process]] = []

    def start(self, module: str, *arguments: str) -> Process:
        name = f"{module}{len(self._started)}"
        with self._run.log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(self._run.path), *arguments],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}, stdout=log, stderr=log,
            )  # fmt: skip
        self._started.append((name, process))
        return process

    def log(self, process: Process) -> str:
        return next(self._run.log(name).read_text() for name, started in self._started if started is process)

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for _, process in self._started:
            process.kill()
            process.wait(10)


def batch(learner: BufferClient, incarnation: int, b: int, limit_s: float = 60.0) -> BatchReply:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        reply = learner.batch(incarnation, b, 0, 1, 1.0)
        if reply.state == "ready":
            return reply
    raise AssertionError(f"batch {b} did not come: {reply.why}")
