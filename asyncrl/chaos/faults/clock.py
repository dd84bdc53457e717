"""Sets the clock of a run: the library of clock.c, built here, is preloaded into every process of the job. Only the
time of day changes; the monotonic clock does not, as on a host whose clock is set."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from asyncrl.chaos.injector import Injector
from asyncrl.chaos.plan import Fault
from asyncrl.errors import ConfigError

SOURCE = Path(__file__).with_name("clock.c")
BUILD_S = 60.0


class Clock(Injector):
    def __init__(self) -> None:
        """Raises ConfigError where the library cannot be built or preloaded."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if sys.platform != "linux" or compiler is None:
            raise ConfigError("--kill clock needs Linux and a C compiler, and there is none: leave clock out.")
        self._folder = tempfile.TemporaryDirectory(prefix="asyncrl-clock-")
        self._library, self._offset = (Path(self._folder.name) / name for name in ("clock.so", "offset"))
        self._set(0.0)
        built = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE), "-ldl", "-lm"],
            capture_output=True, text=True, timeout=BUILD_S,
        )  # fmt: skip
        if built.returncode:
            raise ConfigError(f"--kill clock: {compiler} does not build {SOURCE}: {built.stderr.strip()[-500:]}")

    @property
    def environment(self) -> Mapping[str, str]:
        preloaded = [str(self._library), os.environ.get("LD_PRELOAD", "")]
        return {"LD_PRELOAD": " ".join(filter(None, preloaded)), "ASYNCRL_CLOCK": str(self._offset)}

    def begin(self, fault: Fault) -> str:
        self._set(fault.offset_s)
        return ""

    def close(self) -> None:
        self._folder.cleanup()

    def _set(self, seconds: float) -> None:
        # Written in place and at once, because the processes have mapped the file.
        with self._offset.open("r+b" if self._offset.exists() else "wb", buffering=0) as file:
            file.write(struct.pack("=d", seconds))
