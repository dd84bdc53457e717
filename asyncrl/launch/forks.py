"""A fork: the new run's folder gets the checkpoint, ledger included, and the witnesses of what that ledger holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.buffer.evaluation import place_of
from asyncrl.buffer.ledger.witnessed import Witnessed, read_witnessed
from asyncrl.run_folder import RunFolder, replace


def inherit(run: RunFolder, source: RunFolder, checkpoint: Path) -> None:
    """Whatever is killed on the way, `fresh` says that it is a fork. Raises RunError if the checkpoint's ledger cannot
    be read."""
    replace(run.fresh, checkpoint.name)
    held = read_witnessed(checkpoint)
    run.inherit_configs(source)
    inherit_logs(source.acks, run.acks, held)
    unfinished = run.checkpoints / f".unfinished-{checkpoint.name}"
    shutil.copytree(checkpoint, unfinished)
    unfinished.rename(run.checkpoints / checkpoint.name)


def inherit_logs(source: Path, target: Path, held: Witnessed) -> None:
    """Copies the actors' logs, each up to the last line that the checkpoint's ledger has something of."""
    for log in sorted(source.glob("*.jsonl")):
        whole = [line + b"\n" for line in log.read_bytes().split(b"\n")[:-1]]
        if lines := covered(whole, held, log.stem):
            (target / log.name).write_bytes(b"".join(lines))


def covered(lines: Sequence[bytes], held: Witnessed, actor: str) -> Sequence[bytes]:
    """The log of `actor` up to the last line that the ledger has something of, or was told of. What the actor wrote
    later belongs to the source alone: it never was in the new run's ledger, and so it is not lost."""
    last = max((n for n, line in enumerate(lines, 1) if _is_held(line, held, held.lines.get(actor, -1))), default=0)
    return lines[:last]


def _is_held(line: bytes, held: Witnessed, named: int) -> bool:
    """Whether the ledger has what this line says, or names it or a later one. `named`: the last that it names."""
    try:
        fields: dict[str, Any] = json.loads(line)
        if fields["n"] <= named:
            return True
        if "prefix" in fields:
            said = fields["prefix"]
            return (said["group"], said["index"], said["attempt"], said["digest"]) in held.prefixes
        if "put" in fields:  # of a trajectory, the ledger names the line
            said = fields["put"]
            return (*place_of(said["group"]), said["index"], said["digest"]) in held.results
        return (fields["branch"], fields["group"], fields["index"], fields["digest"]) in held.trajectories
    except (ValueError, KeyError, TypeError):
        return False
