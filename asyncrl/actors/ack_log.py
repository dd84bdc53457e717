"""What this actor put, handed back and was told is stored: evidence for the audit that only the actor writes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from asyncrl.trajectory import CONTEXT, Lease, LogHead, Row, Trajectory


class AckLog:
    """`acks/<actor>.jsonl`: lines that are numbered from 0 and appended in one write each, never rewritten.

        {"n": 0, "put": {...}}          before a trajectory is put: what it is, in the numbers that the ledger keeps
        {"n": 1, "branch": ...}         behind the acknowledgement of a training trajectory
        {"n": 2, "prefix": {...}}       before an interrupted attempt hands back what it has sampled

    A trajectory carries the place of its line and a digest of the log up to it, and the ledger keeps both: so every
    trajectory in the ledger has a line, and a line that is removed or changed later is missed. A killed actor may lack
    the acknowledgements behind its last put. Numbering continues through the actor's restarts.
    """

    def __init__(self, path: Path, flush: bool = False) -> None:
        """`flush`: lines are on the disk before what they announce is sent, so that no power cut takes them alone."""
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.read_bytes() if path.exists() else b""
        whole = written.rfind(b"\n") + 1
        self._next = written.count(b"\n")
        self._digest = xxhash.xxh3_128(written[:whole])
        self._flush = flush
        # A single write of a short line to an O_APPEND file is not torn when a process dies.
        self._path, self._size = path, whole
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, whole)  # a power cut can leave part of a line
        self._flushed: LogHead | None = None

    @property
    def head(self) -> LogHead | None:
        """The last line that the log will keep; None: there is none, or it is not known."""
        return self._flushed if self._flush else self._last

    async def announced(self, t: Trajectory) -> Trajectory:
        """The trajectory with the place of its line, which the log keeps when this returns."""
        announced = self.announce(t)
        await self.flush()
        return announced

    def announce(self, t: Trajectory) -> Trajectory:
        about = {"kind": t.kind, "task_id": t.task_id, "env": t.env, "turns": t.turns, "stop_reason": t.stop_reason}
        rewards = {"reward": float(t.reward), "rewards": {name: float(value) for name, value in t.rewards.items()}}
        tokens = {"tokens": t.num_tokens, "versions": _versions(t.rows)}
        fields = _named(t) | about | rewards | tokens
        self._append({"put": fields})
        return replace(t, logged=self._last)

    def write(self, t: Trajectory) -> None:
        """The buffer acknowledged a training trajectory."""
        self._append(_named(t))

    def hand_back(self, lease: Lease, prefix: Row) -> None:
        """An interrupted attempt is about to hand back what it has sampled."""
        id, attempt = lease
        place = {"branch": id.branch, "group": id.group, "index": id.index, "attempt": attempt}
        sampled = {"digest": prefix.digest(), "tokens": len(prefix), "versions": _versions((prefix,))}
        self._append({"prefix": place | sampled})

    async def flush(self) -> None:
        """Puts the lines on the disk, if the log is to survive a power cut."""
        last = self._last
        if self._flush and last is not None and not self._is_flushed(last):
            await asyncio.to_thread(os.fdatasync, self._file)
            if not self._is_flushed(last):
                self._flushed = last

    def _is_flushed(self, head: LogHead) -> bool:
        return self._flushed is not None and self._flushed.line >= head.line

    @property
    def _last(self) -> LogHead | None:
        return LogHead(self._next - 1, self._digest.hexdigest()) if self._next else None

    def close(self) -> None:
        os.close(self._file)

    def _append(self, fields: Mapping[str, Any]) -> None:
        """Raises OSError on a full disk; the log is then as before."""
        line = f"{json.dumps({'n': self._next, **fields})}\n".encode()
        if os.write(self._file, line) < len(line):  # as much as there was room for
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._size += len(line)
        self._digest.update(line)
        self._next += 1


def _named(t: Trajectory) -> dict[str, Any]:
    id = t.id
    fields = {"branch": id.branch, "group": id.group, "index": id.index, "attempt": t.attempt}
    return {**fields, "digest": t.digest()}


def _versions(rows: tuple[Row, ...]) -> list[list[int]]:
    """[version, policy tokens of it], oldest first."""
    versions = np.concatenate([row.versions for row in rows])
    values, counts = np.unique(versions[versions != CONTEXT], return_counts=True)
    return [[int(v), int(n)] for v, n in zip(values, counts, strict=True)]
