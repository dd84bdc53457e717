"""A log of numbered lines that a process of the run keeps as evidence for the audit: appended, never rewritten."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.trajectory import LogHead


class NumberedLog:
    """JSON lines, numbered from 0 through all restarts of the process, each appended in one write."""

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
        self._flushing: asyncio.Task[None] | None = None

    @property
    def head(self) -> LogHead | None:
        """The last line that the log will keep; None: there is none, or it is not known."""
        return self._flushed if self._flush else self._last

    async def flush(self) -> None:
        """Puts the lines on the disk, if the log is to survive a power cut. Who comes while the disk is busy waits for
        its next turn, which takes the lines of all of them. Raises OSError."""
        last = self._last
        while self._flush and last is not None and not self._is_flushed(last):
            if self._flushing is None:
                self._flushing = asyncio.create_task(self._flush_all())
            await asyncio.shield(self._flushing)

    async def _flush_all(self) -> None:
        last = self._last
        try:
            await asyncio.to_thread(os.fdatasync, self._file)
            self._flushed = last
        finally:
            self._flushing = None

    def flush_now(self) -> None:
        """The same, for a process without an event loop."""
        last = self._last
        if self._flush and last is not None and not self._is_flushed(last):
            os.fdatasync(self._file)
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
