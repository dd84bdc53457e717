"""Which teacher a run has: the digest of its weights, which resuming and replay compare with the one that they load."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.errors import RunError


def remember(file: Path, path: str, digest: str) -> None:
    """Writes the teacher of the run into `file`, which a start before this one may have done. Raises RunError if that
    was another teacher. Nothing without one."""
    if not digest:
        return
    if file.is_file():
        refuse_another(recorded(file), digest, path, f"recorded in {file}")
        return
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"path": path, "digest": digest}, indent=1))
    unfinished.replace(file)


def recorded(file: Path) -> str:
    """The digest in `file`; empty without one. Raises RunError when it is damaged."""
    if not file.is_file():
        return ""
    try:
        return str(json.loads(file.read_text())["digest"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} is damaged ({error}): it names the teacher that the run learned from. Restore it; if the model in "
            "learner.teacher.path is that one for certain, remove the file."
        ) from error


def refuse_another(had: str, has: str, path: str, where: str) -> None:
    """Raises RunError unless both digests are the same; an empty one is none."""
    if had and has and had != has:
        raise RunError(
            f"the teacher in learner.teacher.path ({path}) has the digest {has[:12]}, and the run learned from one "
            f"with {had[:12]}, {where}: put that one back, or start another run with this one."
        )
