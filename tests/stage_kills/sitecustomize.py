"""Python imports this first in every process whose PYTHONPATH names this folder: kills a role's process at a stage.

STAGE_KILLS lists `role module:Class.method before|after nth`, separated by commas; of a role's entries the first that
has not killed yet is armed. STAGE_KILLS_DONE is a folder that remembers which have.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def arm(place: str, when: str, nth: int, marker: Path) -> None:
    module, _, path = place.partition(":")
    owner_name, _, name = path.partition(".")
    owner = getattr(importlib.import_module(module), owner_name)
    original: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def reached(stage: str) -> None:
        if stage == "before":
            calls[0] += 1
        if stage == when and calls[0] >= nth:
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(original)
    def plain(*args: Any, **kwargs: Any) -> Any:
        reached("before")
        result = original(*args, **kwargs)
        reached("after")
        return result

    @functools.wraps(original)
    async def waiting(*args: Any, **kwargs: Any) -> Any:
        reached("before")
        result = await original(*args, **kwargs)
        reached("after")
        return result

    setattr(owner, name, waiting if inspect.iscoroutinefunction(original) else plain)


def main() -> None:
    # Grandchildren (a compiler, a tracker) carry the same environment: only the role itself is meant.
    if os.environ.get("STAGE_KILLS") is None or os.getpid() != os.getsid(0) or sys.platform != "linux":
        return
    role = os.environ.get("ASYNCRL_ROLE", "")
    for number, entry in enumerate(os.environ["STAGE_KILLS"].split(",")):
        who, place, when, nth = entry.split()
        marker = Path(os.environ["STAGE_KILLS_DONE"]) / f"{number:02d}-{who}"
        if who == role and not marker.exists():
            arm(place, when, int(nth), marker)
            return


main()
