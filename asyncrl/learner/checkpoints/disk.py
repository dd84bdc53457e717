"""What a disk that refuses a folder of the learner's says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import RunError


@contextmanager
def disk_errors(what: str, unfinished: Path, remedy: str) -> Iterator[None]:
    """Raises RunError in place of OSError, and removes the folder `unfinished`. `remedy`: what to do but free space."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunError(
            f"{what} cannot be written: {error.strerror or error}. Free space there, or {remedy}; then continue with "
            "--resume."
        ) from error
