"""What this actor was told is stored: a witness for the audit that neither the buffer nor the learner can alter."""

from __future__ import annotations

import json
import os
from pathlib import Path

from asyncrl.trajectory import Trajectory


class AckLog:
    """`acks/<actor>.jsonl`: one line per acknowledged training trajectory, appended whole, never rewritten.

    A line follows the acknowledgement, so a killed actor may lack its last lines; it never names what is not stored.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One write of a short line to an O_APPEND file is not torn, whoever dies meanwhile.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, t: Trajectory) -> None:
        id = t.id
        line = {"branch": id.branch, "group": id.group, "index": id.index, "attempt": t.attempt, "digest": t.digest()}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)
