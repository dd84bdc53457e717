"""A fork: the new run's folder gets the checkpoint, ledger included, and the witnesses of what that ledger holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from asyncrl.buffer.ledger.snapshot import stored
from asyncrl.run_folder import RunFolder, replace


def inherit(run: RunFolder, source: RunFolder, checkpoint: Path) -> None:
    """Whatever is killed on the way, `fresh` says that it is a fork. Raises RunError if the checkpoint's ledger cannot
    be read."""
    replace(run.fresh, checkpoint.name)
    held = stored(checkpoint)
    run.inherit_configs(source)
    for log in sorted(source.acks.glob("*.jsonl")):
        if lines := covered(log.read_text(errors="replace").splitlines(keepends=True), held):
            (run.acks / log.name).write_text("".join(lines))
    unfinished = run.checkpoints / f".unfinished-{checkpoint.name}"
    shutil.copytree(checkpoint, unfinished)
    unfinished.rename(run.checkpoints / checkpoint.name)


def covered(lines: Iterable[str], held: Collection[tuple[int, int, int, str]]) -> list[str]:
    """An actor's log up to the last acknowledgement of what the ledger holds. What it acknowledges later belongs to the
    source alone: it never was in the new run's ledger, and so it is not lost."""
    found = list(lines)
    last = max((n for n, line in enumerate(found, 1) if _named(line) in held), default=0)
    return found[:last]


def _named(line: str) -> tuple[int, int, int, str] | None:
    """The trajectory that a line acknowledges; None if it cannot be read."""
    try:
        ack = json.loads(line)
        return ack["branch"], ack["group"], ack["index"], ack["digest"]
    except (ValueError, KeyError, TypeError):
        return None
