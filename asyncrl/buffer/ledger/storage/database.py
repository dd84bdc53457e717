"""The ledger's SQLite file together with its payloads: opened safely, committed as one.

A commit first writes the payloads, then the rows. With `fsync: commit` both are on the disk when it returns; with
`interval` a thread flushes them every `fsync_interval_s`; with `off` the kernel decides, and a power cut may cost the
whole ledger (resume from the last checkpoint). `kill -9` never undoes a commit in any mode.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import resource
import sqlite3
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from asyncrl.buffer.ledger.storage import schema
from asyncrl.buffer.ledger.storage.chain import Chain
from asyncrl.buffer.ledger.storage.payloads import Payloads
from asyncrl.errors import ConfigError, RunError

Fsync = Literal["commit", "interval", "off"]

_NETWORK = ("nfs", "cifs", "smb", "9p", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.sshfs", "afs", "ocfs2")


class LedgerFailed(RunError):
    """The disk refused a write, or the file is damaged. Nothing since the last commit was acknowledged."""


class Database:
    """Opens `folder`/ledger.sqlite and `folder`/payloads exclusively: a second opener is refused.

    Raises ConfigError on a network filesystem, LedgerFailed when the folder cannot be written, the file is damaged or
    of another version.
    """

    def __init__(
        self,
        folder: Path,
        fsync: Fsync = "interval",
        fsync_interval_s: float = 1.0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`wall_clock`: seconds since the epoch, for the times in the rows; nothing is decided by them."""
        refuse_network_filesystem(folder)
        self.wall_clock = wall_clock
        self.path = folder / "ledger.sqlite"
        self.fsync = fsync
        self._interval_s = fsync_interval_s
        self._flushed_at = float("-inf")
        """Time at which the last flush began."""
        self._flushing: Future[None] | None = None
        self._unflushed = False
        """Something was committed since then."""
        self.dirty = False
        """Something has changed since the last commit."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if _files_used_up() is not None:
                raise self._failed(error) from error
            raise LedgerFailed(
                f"{folder} cannot be written: {error.strerror}. Make it writable, or set buffer.dir."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise LedgerFailed(f"{folder} is in use by another buffer process: stop that one first.") from None
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, cached_statements=256)
            self._prepare()
            self._chain = Chain(self._db)
            self.payloads = Payloads(folder / "payloads", flush=fsync == "commit", settle=fsync != "off")
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock)
            raise self._failed(error) from error
        except LedgerFailed:
            self._db.close()
            os.close(self._lock)
            raise

    def _prepare(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version not in (0, schema.VERSION) or (version == 0 and tables):
            raise LedgerFailed(f"the ledger {self.path} cannot be continued: {schema.refusal(version)}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'OFF' if self.fsync == 'off' else 'FULL'}")
        self._db.execute("PRAGMA wal_autocheckpoint = 4000")
        if not tables:
            self._db.executescript(f"BEGIN; {schema.TABLES} PRAGMA user_version = {schema.VERSION}; COMMIT;")
        elif (answer := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(answer)
        if self.fsync == "interval":
            self._db.execute("PRAGMA synchronous = NORMAL")

    def write(self, sql: str, values: tuple[Any, ...] = ()) -> int:
        """Executes one changing statement in the open transaction; returns the row's number."""
        try:
            if not self.dirty:
                self._db.execute("BEGIN IMMEDIATE")
                self.dirty = True
            row = self._db.execute(sql, values).lastrowid or 0
            self._chain.note(sql, values)
            return row
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def read(self, sql: str, values: tuple[Any, ...] = ()) -> Iterable[tuple[Any, ...]]:
        try:
            return self._db.execute(sql, values)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def commit(self, now: float) -> None:
        """Commits everything or nothing. If it raises LedgerFailed the process must end: memory is ahead of the disk.

        Under `fsync: interval` a thread flushes what was committed; with `now` = infinity this waits for it.
        """
        try:
            if self.dirty:
                self.payloads.write(flush=self.fsync == "commit")
                self._chain.seal()
                self._db.execute("COMMIT")
                self.dirty = False
                self._unflushed = self.fsync == "interval"
            last = math.isinf(now)
            if self._flushing is not None and (last or self._flushing.done()):
                self._flushing.result()
                self._flushing = None
            if self._unflushed and self._flushing is None and now >= self._flushed_at + self._interval_s:
                self._flushing = self.payloads.flush(self._flush_log)
                self._flushed_at, self._unflushed = now, False
                if last:
                    self._flushing.result()
                    self._flushing = None
            self.payloads.rotate_if_full()
        except (sqlite3.Error, OSError) as error:
            raise self._failed(error) from error

    @property
    def unflushed(self) -> bool:
        """A power cut could undo a commit that `fsync` promises to flush soon."""
        return self._unflushed or self._flushing is not None

    def _flush_log(self) -> None:
        """Under NORMAL, SQLite's commits write this file without a flush. SQLite holds no lock on it that a close would
        release."""
        log = os.open(f"{self.path}-wal", os.O_RDONLY)
        try:
            os.fsync(log)
        finally:
            os.close(log)

    def get(self, key: str) -> str | None:
        row = next(iter(self.read("SELECT value FROM kv WHERE key = ?", (key,))), None)
        return None if row is None else str(row[0])

    def set(self, key: str, value: str) -> None:
        self.write("INSERT OR REPLACE INTO kv VALUES (?, ?)", (key, value))

    def unset(self, key: str) -> None:
        self.write("DELETE FROM kv WHERE key = ?", (key,))

    def close(self) -> None:
        """Discards what was not committed, as a crash would."""
        self.payloads.close()
        self._db.close()
        os.close(self._lock)

    def _failed(self, error: Exception) -> LedgerFailed:
        if type(error) is sqlite3.DatabaseError:  # its subclasses are a full disk, a lock, a fault of ours
            return LedgerFailed(
                f"the ledger {self.path} is damaged ({error}): move the folder {self.path.parent} away, and --resume "
                "restores the ledger of the newest checkpoint and goes on from there."
            )
        if (most := _files_used_up()) is not None:
            return LedgerFailed(
                f"the ledger {self.path} failed: {error}. The buffer process has reached its limit of {most} open "
                "files and sockets; the disk is not the cause. Everything acknowledged is kept; raise the limit "
                "(`ulimit -n`, or LimitNOFILE of the service that starts the run), then start it again with --resume."
            )
        return LedgerFailed(
            f"the ledger {self.path} failed: {error}. Everything acknowledged is kept; check the space and the rights "
            "of that disk, then start the run again with --resume."
        )


def _files_used_up() -> int | None:
    """The limit of open files, if it is reached now: SQLite says only that a file cannot be opened."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None


def refuse_network_filesystem(folder: Path, mounts: str = "/proc/self/mounts") -> None:
    """SQLite's locks and write-ahead log need a local disk. Raises ConfigError."""
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return  # not Linux: the filesystem is unknown
    points = [(fields[1], fields[2]) for fields in map(str.split, lines) if len(fields) > 2]
    resolved = str(folder.resolve())
    inside = [p for p in points if resolved == p[0] or resolved.startswith(p[0].rstrip("/") + "/")]
    if not inside:
        return
    point, kind = max(inside, key=lambda p: len(p[0]))
    if kind.startswith(_NETWORK):
        raise ConfigError(
            f"buffer.dir {folder} lies on {point}, a network filesystem ({kind}); the ledger needs a local disk: "
            "set buffer.dir to a folder on one."
        )
