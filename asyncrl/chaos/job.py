"""One run, started as a user starts it, and the faults that are injected into it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import yaml

from asyncrl.chaos.injector import Injector
from asyncrl.chaos.plan import Fault
from asyncrl.chaos.schedule import Schedule
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.launch.bound import BoundLaunch
from asyncrl.launch.diagnosis import waits
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder

POLL_S = 0.05
ORPHAN_S = 5.0
"""Seconds in which the last process of a run must end after its launcher."""
KILL_S = 20.0


class Job:
    """An `asyncrl launch` in a process of its own."""

    def __init__(
        self, config: Config, name: str, say: Callable[[str], None], injectors: Mapping[str, Injector] | None = None
    ) -> None:
        """`injectors`: by the kind of fault. `say` prints a line."""
        self.run = RunFolder((Path(config.launch.runs_dir) / name).absolute())
        self.began = 0.0
        """Time of the first training step; by time.monotonic."""
        self.resumed = 0
        """How often the run ended on a full disk and was resumed."""
        self._say = say
        self._injectors = dict(injectors or {})
        self._ids: set[str] = set()
        """The run id of each launch."""
        self._launcher: BoundLaunch
        self._config = config.model_copy(update={"launch": config.launch.model_copy(update={"name": name})})

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Starts the run; no process of it lives afterwards, however the context is left."""
        with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as folder, contextlib.ExitStack() as opened:
            config = Path(folder) / "config.yaml"
            config.write_text(yaml.safe_dump(self._config.model_dump(mode="json"), sort_keys=False))
            for injector in dict.fromkeys(self._injectors.values()):
                opened.callback(injector.close)
                injector.open(self.run)
            self._launch("--config", str(config))
            try:
                yield
            finally:
                if self._launcher.poll() is None:
                    self._launcher.kill()  # the guardian ends the rest
                    self._launcher.wait(KILL_S)
                self.orphans()
                kill_all(self._left())

    def begin(self, within_s: float) -> None:
        """Waits for the first training step. Raises RunError."""
        deadline = time.monotonic() + within_s
        while not self._steps():
            if self._launcher.poll() is not None:
                raise RunError(f"no first training step: the launcher ended with exit code {self._launcher.returncode}")
            if time.monotonic() > deadline:
                raise RunError(f"no first training step within {within_s:g} s: {self._why()}")
            time.sleep(POLL_S)
        self._ids.add(self.run.id)
        self.began = time.monotonic()

    def inject(self, faults: Sequence[Fault], within_s: float) -> list[Fault]:
        """Injects each fault at its time and waits for the end of the run. Gives the injected ones: a run that ends
        early escapes the rest. Raises RunError when it does not end within `within_s` after the last fault."""
        schedule = Schedule(faults, within_s)
        was_full = False  # since the last start: such a launch may end with exit code 1 and be resumed
        try:
            while True:
                now = time.monotonic() - self.began
                self._end(schedule.ended(now))
                if self._launcher.poll() is not None:
                    if self._launcher.returncode != 1 or not was_full:
                        return schedule.begun
                    self._end(schedule.ended(float("inf")))
                    self._resume()
                    was_full = False
                fault = schedule.due(now)
                if fault is not None and self._injectors[fault.kind].ready(fault):
                    schedule.begin(fault, now)
                    self._begin(fault)
                    was_full |= fault.kind == "disk-full"
                if schedule.overdue(now):
                    raise RunError(f"it did not end within {within_s:g} s after the last fault: {self._why()}")
                time.sleep(POLL_S)
        finally:
            self._end(schedule.ended(float("inf")))

    def end(self) -> tuple[int, str]:
        """Exit code of the ended run, and its reason from the summary."""
        code = self._launcher.wait(KILL_S)
        summary = json.loads(self.run.summary.read_text()) if self.run.summary.is_file() else {}
        return code, str(summary.get("why") or summary.get("outcome") or "no summary was left")

    def orphans(self) -> list[str]:
        """Processes of the run that still live after its launcher."""
        deadline = time.monotonic() + ORPHAN_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return [f"{process.pid} ({process.name()})" for process in left]

    def _left(self) -> list[psutil.Process]:
        return [process for run_id in self._ids for process in of_run(run_id)]

    def _begin(self, fault: Fault) -> None:
        at_s, step = time.monotonic() - self.began, self._steps()
        details = self._injectors[fault.kind].begin(fault)
        self._say(f"{at_s:7.1f} s  {fault}, at step {step}{f' ({details})' if details else ''}")

    def _end(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._injectors[fault.kind].end(fault)

    def _launch(self, *words: str) -> None:
        needed = {name: value for injector in self._injectors.values() for name, value in injector.environment.items()}
        self._launcher = BoundLaunch(*words, output=subprocess.DEVNULL, environment=needed)

    def _resume(self) -> None:
        """Raises RunError when the run does not begin again."""
        before = self.run.id
        self.resumed += 1
        self._say(f"{time.monotonic() - self.began:7.1f} s  the run ended on its full disk, and is resumed")
        self._launch("--resume", str(self.run.path))
        deadline = time.monotonic() + KILL_S
        while self.run.id == before:
            if self._launcher.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"it cannot be resumed after its disk was full: exit code {self._launcher.returncode}")
            time.sleep(POLL_S)
        self._ids.add(self.run.id)

    def _steps(self) -> int:
        from asyncrl.tracking.sinks.jsonl import by_step

        return max((int(record["step"]) for record in by_step(self.run.metrics)), default=0)

    def _why(self) -> str:
        return "; ".join(waits.why(self.run))
