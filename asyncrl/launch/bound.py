"""An `asyncrl launch` that another command runs for itself, and that ends with that command, however it ends."""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Mapping
from typing import IO

from asyncrl.launch.processes import python
from asyncrl.process import lifeline


class BoundLaunch(subprocess.Popen[bytes]):
    """The launcher of a run, in a session of its own. It is killed when the process that started it is gone, and its
    guardian then ends the rest of the run."""

    def __init__(
        self,
        *words: str,
        output: int | IO[str],
        errors: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`words`: those of the command line behind `launch`. `environment`: variables beside those of this process.
        `output`, `errors`: as `stdout` and `stderr` of Popen. Raises OSError when it cannot be started."""
        reading, writing = os.pipe()
        weakref.finalize(self, os.close, writing)
        try:
            super().__init__(
                python("asyncrl", "launch", *words),
                env={**os.environ, **(environment or {}), lifeline.ENVIRONMENT: str(reading)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=[reading],
                start_new_session=True,
            )
        finally:
            os.close(reading)
