"""The trajectories that the buffer acknowledged to this actor: evidence for the audit that only the actor writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from asyncrl.trajectory import Trajectory


class AckLog:
    """`acks/<actor>.jsonl`: one line per acknowledged training trajectory, appended in one write, never rewritten.

    A line follows the acknowledgement: a killed actor may lack its last lines, but each line names a stored trajectory.
    Numbering continues through the actor's restarts, so a line removed later leaves a gap.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.read_bytes() if path.exists() else b""
        self._next = written.count(b"\n")
        # A single write of a short line to an O_APPEND file is not torn when a process dies.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, written.rfind(b"\n") + 1)  # a power cut can leave part of a line

    def write(self, t: Trajectory) -> None:
        id = t.id
        fields = {"n": self._next, "branch": id.branch, "group": id.group, "index": id.index}
        line = json.dumps(fields | {"attempt": t.attempt, "digest": t.digest()})
        os.write(self._file, f"{line}\n".encode())
        self._next += 1

    def close(self) -> None:
        os.close(self._file)
