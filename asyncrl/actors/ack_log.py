"""What this actor was told is stored: a witness for the audit that neither the buffer nor the learner can alter."""

from __future__ import annotations

import json
import os
from pathlib import Path

from asyncrl.trajectory import Trajectory


class AckLog:
    """`acks/<actor>.jsonl`: one line per acknowledged training trajectory, appended whole, never rewritten.

    A line follows the acknowledgement, so a killed actor may lack its last lines; it never names what is not stored.
    Lines are numbered through the actor's restarts: one that is taken out later leaves a gap.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        so_far = path.read_bytes() if path.exists() else b""
        self._next = so_far.count(b"\n")
        # One write of a short line to an O_APPEND file is not torn, whoever dies meanwhile.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, so_far.rfind(b"\n") + 1)  # a power cut can leave a part of a line

    def write(self, t: Trajectory) -> None:
        id = t.id
        names = {"n": self._next, "branch": id.branch, "group": id.group, "index": id.index}
        line = json.dumps(names | {"attempt": t.attempt, "digest": t.digest()})
        os.write(self._file, f"{line}\n".encode())
        self._next += 1

    def close(self) -> None:
        os.close(self._file)
