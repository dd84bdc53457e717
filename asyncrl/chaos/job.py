"""One run as a user starts it, and the faults that befall its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml

from asyncrl.buffer.client import BufferClient
from asyncrl.chaos.plan import Fault
from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, RunError
from asyncrl.launch import stall
from asyncrl.launch.processes import alive, kill_all, of_run
from asyncrl.run_folder import RunFolder

POLL_S = 0.05
CAUSED_S = 5.0
ORPHAN_S = 5.0
"""In which the last process of a run has ended after its launcher."""
KILL_S = 20.0


class Job:
    """`asyncrl launch` in a process of its own."""

    def __init__(self, config: Config, name: str, say: Callable[[str], None]) -> None:
        self.run = RunFolder((Path(config.launch.runs_dir) / name).absolute())
        self.began = 0.0
        """When the first training step was done; by time.monotonic."""
        self._say = say
        self._id = ""
        self._launcher: subprocess.Popen[bytes]
        self._config = config.model_copy(update={"launch": config.launch.model_copy(update={"name": name})})

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """However it is left: nothing of the run lives afterwards."""
        with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as folder:
            config = Path(folder) / "config.yaml"
            config.write_text(yaml.safe_dump(self._config.model_dump(mode="json"), sort_keys=False))
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "asyncrl", "launch", "--config", str(config)],
                stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                yield
            finally:
                if self._launcher.poll() is None:
                    self._launcher.kill()  # the guardian ends the rest
                    self._launcher.wait(KILL_S)
                if self._id:
                    self.orphans()
                    kill_all(of_run(self._id))

    def begin(self, within_s: float) -> None:
        """Until its first training step is done. Raises RunError."""
        self._until(lambda: self._steps() > 0, within_s, "no first training step")
        self._id, self.began = self.run.id, time.monotonic()

    def suffer(self, faults: Sequence[Fault], within_s: float) -> list[Fault]:
        """The faults, each at its time, and the run to its end. Those that befell a process; a run that ends early
        spares itself the rest. Raises RunError when it does not end within `within_s` after the last."""
        suffered, halted = [], dict[int, float]()
        left = list(faults)
        deadline = self.began + (faults[-1].at_s if faults else 0.0) + within_s
        try:
            while self._launcher.poll() is None:
                now = time.monotonic()
                for pid in [pid for pid, until in halted.items() if now >= until]:
                    del halted[pid]
                    _signal(pid, signal.SIGCONT)
                # A role that is not there now is waited for.
                if left and now - self.began >= left[0].at_s and (pid := self._pid(left[0].role)):
                    fault = left.pop(0)
                    self._strike(fault, pid)
                    suffered.append(fault)
                    if fault.stop_s:
                        halted[pid] = now + fault.stop_s
                if now > deadline:
                    raise RunError(f"it did not end within {within_s:g} s after the last fault: {self._why()}")
                time.sleep(POLL_S)
        finally:
            for pid in halted:
                _signal(pid, signal.SIGCONT)
        return suffered

    def end(self) -> tuple[int, str]:
        """Exit code and, from the summary, why."""
        code = self._launcher.wait(KILL_S)
        summary = json.loads(self.run.summary.read_text()) if self.run.summary.is_file() else {}
        return code, str(summary.get("why") or summary.get("outcome") or "no summary was left")

    def orphans(self) -> list[str]:
        """What of the run still lives after its launcher."""
        deadline = time.monotonic() + ORPHAN_S
        while (left := of_run(self._id)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return [f"{process.pid} ({process.name()})" for process in left]

    def _strike(self, fault: Fault, pid: int) -> None:
        self._say(f"{time.monotonic() - self.began:7.1f} s  {fault} (pid {pid}), at step {self._steps()}")
        if fault.role.startswith("learner") and not fault.stop_s:
            self._tell_caused()
        _signal(pid, signal.SIGSTOP if fault.stop_s else signal.SIGKILL)

    def _tell_caused(self) -> None:
        """A death that is meant says nothing against the batch in the learner's hands."""
        client = BufferClient(self.run.address("buffer"), identity=f"chaos-{os.getpid()}", deadline_s=CAUSED_S)
        try:
            client.caused()
        except AsyncRLError as error:
            self._say(f"           the buffer was not told that the learner's death is meant: {error}")
        finally:
            client.close()

    def _pid(self, role: str) -> int:
        pid, created = self.run.record()["processes"].get(role, (0, 0.0))
        return int(pid) if pid and alive(pid, created) else 0

    def _steps(self) -> int:
        from asyncrl.tracking.jsonl import by_step

        return max((int(record["step"]) for record in by_step(self.run.metrics)), default=0)

    def _until(self, reached: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not reached():
            if self._launcher.poll() is not None:
                raise RunError(f"{what}: the launcher ended with exit code {self._launcher.returncode}")
            if time.monotonic() > deadline:
                raise RunError(f"{what} within {within_s:g} s: {self._why()}")
            time.sleep(POLL_S)

    def _why(self) -> str:
        return "; ".join(stall.why(self.run))


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
