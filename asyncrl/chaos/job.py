"""One run as a user starts it, and the faults that befall it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import yaml

from asyncrl.chaos.injector import Means
from asyncrl.chaos.plan import Fault
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.launch.diagnosis import waits
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder

POLL_S = 0.05
ORPHAN_S = 5.0
"""In which the last process of a run has ended after its launcher."""
KILL_S = 20.0


class Job:
    """`asyncrl launch` in a process of its own."""

    def __init__(
        self, config: Config, name: str, say: Callable[[str], None], means: Mapping[str, Means] | None = None
    ) -> None:
        """`means`: by the kind of fault."""
        self.run = RunFolder((Path(config.launch.runs_dir) / name).absolute())
        self.began = 0.0
        """When the first training step was done; by time.monotonic."""
        self.resumed = 0
        """How often it ended because its disk was full, as it says that it does, and was told to go on."""
        self._say = say
        self._means = dict(means or {})
        self._ids: set[str] = set()
        """One of each launch."""
        self._launcher: subprocess.Popen[bytes]
        self._config = config.model_copy(update={"launch": config.launch.model_copy(update={"name": name})})

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """However it is left: nothing of the run lives afterwards."""
        with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as folder, contextlib.ExitStack() as opened:
            config = Path(folder) / "config.yaml"
            config.write_text(yaml.safe_dump(self._config.model_dump(mode="json"), sort_keys=False))
            for means in dict.fromkeys(self._means.values()):
                opened.callback(means.close)
                means.open(self.run)
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
        """Until its first training step is done. Raises RunError."""
        deadline = time.monotonic() + within_s
        while not self._steps():
            if self._launcher.poll() is not None:
                raise RunError(f"no first training step: the launcher ended with exit code {self._launcher.returncode}")
            if time.monotonic() > deadline:
                raise RunError(f"no first training step within {within_s:g} s: {self._why()}")
            time.sleep(POLL_S)
        self._ids.add(self.run.id)
        self.began = time.monotonic()

    def suffer(self, faults: Sequence[Fault], within_s: float) -> list[Fault]:
        """The faults, each at its time, and the run to its end. Gives those that befell it: a run that ends early
        spares itself the rest. Raises RunError when it does not end within `within_s` after the last."""
        suffered: list[Fault] = []
        left, passing = list(faults), dict[Fault, float]()
        behind_s, end_s = 0.0, (faults[-1].at_s if faults else 0.0) + within_s
        was_full = False  # in this launch, which may then end for it: it says so, and that it can be resumed
        try:
            while True:
                now = time.monotonic()
                for fault in [fault for fault, until in passing.items() if now >= until]:
                    self._end(fault, passing)
                if self._launcher.poll() is not None:
                    if self._launcher.returncode != 1 or not was_full:
                        return suffered
                    for fault in list(passing):
                        self._end(fault, passing)
                    self._resume()
                    was_full = False
                if left and now - self.began >= left[0].at_s + behind_s and self._possible(left[0], passing):
                    fault = left.pop(0)
                    behind_s = now - self.began - fault.at_s  # one that had to wait delays those after it
                    self._begin(fault)
                    suffered.append(fault)
                    if fault.for_s:
                        passing[fault] = time.monotonic() + fault.for_s
                    was_full |= fault.kind == "disk-full"
                if now - self.began > end_s + behind_s:
                    raise RunError(f"it did not end within {within_s:g} s after the last fault: {self._why()}")
                time.sleep(POLL_S)
        finally:
            for fault in list(passing):
                self._end(fault, passing)

    def end(self) -> tuple[int, str]:
        """Exit code and, from the summary, why."""
        code = self._launcher.wait(KILL_S)
        summary = json.loads(self.run.summary.read_text()) if self.run.summary.is_file() else {}
        return code, str(summary.get("why") or summary.get("outcome") or "no summary was left")

    def orphans(self) -> list[str]:
        """What of the run still lives after its launcher."""
        deadline = time.monotonic() + ORPHAN_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return [f"{process.pid} ({process.name()})" for process in left]

    def _left(self) -> list[psutil.Process]:
        return [process for id in self._ids for process in of_run(id)]

    def _possible(self, fault: Fault, passing: Mapping[Fault, float]) -> bool:
        """What is not there now is waited for, and a disk or a link has one trouble at a time."""
        return self._means[fault.kind].ready(fault) and not any(other.kind == fault.kind for other in passing)

    def _begin(self, fault: Fault) -> None:
        at_s, step = time.monotonic() - self.began, self._steps()
        said = self._means[fault.kind].begin(fault)
        self._say(f"{at_s:7.1f} s  {fault}, at step {step}{f' ({said})' if said else ''}")

    def _end(self, fault: Fault, passing: dict[Fault, float]) -> None:
        del passing[fault]
        self._means[fault.kind].end(fault)

    def _launch(self, *words: str) -> None:
        needed = {name: value for means in self._means.values() for name, value in means.environment.items()}
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "launch", *words], env={**os.environ, **needed},
            stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def _resume(self) -> None:
        """Raises RunError when it does not begin."""
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
