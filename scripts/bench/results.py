"""Results that are on the disk as soon as they are there: an interrupted benchmark leaves NAME.part.json."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any


def keep(out: Path, found: Any) -> None:
    """What there is so far, beside the results of an earlier, whole measurement."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _part(out).write_text(json.dumps(found, indent=1) + "\n")


def finish(out: Path, found: Any) -> None:
    """All of it, in the place of the earlier results."""
    keep(out, found)
    _part(out).replace(out)


def kept(out: Path) -> Any:
    """What an interrupted measurement has left; None: nothing."""
    part = _part(out)
    return json.loads(part.read_text()) if part.is_file() else None


def processor() -> str:
    """The name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _part(out: Path) -> Path:
    return out.with_suffix(".part.json")
