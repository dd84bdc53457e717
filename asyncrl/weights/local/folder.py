"""A folder of policy versions in shared memory, without torch: one writer, any number of readers.

A version appears in two renames: its complete file gets its name, then `latest.json` points at it. So a reader sees the
old version or the new one; a truncated file has no trailer, and an altered one another digest: both are WeightsCorrupt.
The folder holds at most `keep` versions and one file for the next.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TypeVar

from asyncrl.errors import RunError
from asyncrl.weights.local.file import Entry, digest_of, read_index, verify
from asyncrl.weights.local.reused_files import Maps, ReusedFile, hold, release
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion

_POINTER = "latest.json"


class Folder:
    """The only writer of `dir`. Readers may continue to use a version that was removed."""

    def __init__(self, dir: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1")
        self.dir, self.keep = dir, keep
        self._slots: dict[Path, ReusedFile] = {}
        dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left_over in (*dir.glob("*.tmp"), *dir.glob("*.spare")):
            left_over.unlink()

    def begin(self) -> ReusedFile:
        """A file to write the next version into."""
        unfinished = self.dir / "next.tmp"
        for path in [path for path in self._slots if path.suffix == ".spare"]:
            slot = self._slots.pop(path)
            if slot.take():
                slot.rename(unfinished)
                return slot
            slot.remove()
        slot = ReusedFile(unfinished)
        slot.take()
        return slot

    def commit(self, slot: ReusedFile, id: WeightsVersion) -> None:
        """Make `slot`, which holds the complete version `id`, the latest."""
        slot.give()
        slot.rename(self.dir / f"{id.branch:06d}-{id.version:010d}.weights")
        if (same := self._slots.pop(slot.path, None)) is not None:
            same.close()  # the version was published before
        self._slots[slot.path] = slot
        pointer = self.dir / (_POINTER + ".tmp")
        entry = {"branch": id.branch, "version": id.version, "digest": id.digest, "file": slot.path.name}
        pointer.write_text(json.dumps(entry))
        os.replace(pointer, self.dir / _POINTER)
        # Names sort by branch and version, except when a version is published a second time.
        names = sorted(name for name in os.listdir(self.dir) if name.endswith(".weights"))
        for old in [self.dir / name for name in names[: -self.keep]]:
            if old == slot.path:
                continue
            mine = self._slots.pop(old, None)
            if mine is not None and not any(path.suffix == ".spare" for path in self._slots):
                mine.rename(old.with_suffix(".spare"))
                self._slots[mine.path] = mine
            else:
                old.unlink()
                if mine is not None:
                    mine.close()

    def error(self, error: OSError, version: int) -> RunError:
        return RunError(
            f"weights of version {version} cannot be written to {self.dir}: {error.strerror}. "
            "Free space there (shared memory of a container: raise --shm-size)."
        )


class File:
    """A mapped version. It may only be read, and only until `close`: then its memory is reused."""

    def __init__(self, path: Path, id: WeightsVersion, verify_bytes: bool, maps: Maps | None = None) -> None:
        """Raises WeightsCorrupt, or FileNotFoundError if the file was replaced."""
        self.id = id
        self.path = path
        """Its path when it was opened; the publisher may have removed it since."""
        self._held: int | None = hold(path)
        self.entries: tuple[Entry, ...] = ()
        try:
            if os.fstat(self._held).st_size == 0:
                raise WeightsCorrupt(f"{path} has 0 bytes: it is truncated")
            self.map = (maps or Maps()).of(self._held, path.parent)
            self.entries = read_index(self.map, path)
            if digest_of(self.entries) != id.digest:
                raise WeightsCorrupt(f"{path} holds weights of another digest than {id}")
            if verify_bytes:
                verify(self.map, self.entries, path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the file, so that the publisher can reuse it."""
        if self._held is not None:
            release(self._held)
            self._held = None
        self.entries = ()


F = TypeVar("F", bound="File")


class Watch:
    """A reader of `dir`; there may be any number of them."""

    def __init__(self, dir: Path) -> None:
        self.dir = dir
        self._seen: tuple[tuple[int, int], WeightsVersion, str] | None = None
        self._maps = Maps()
        self._lock = threading.Lock()

    def latest(self) -> WeightsVersion | None:
        """The latest version; None before the first publication. Costs one stat if nothing changed."""
        found = self.pointer()
        return found[0] if found else None

    def file(self, verify_bytes: bool) -> File:
        """The newest version. Raises WeightsCorrupt."""
        return self._open(File, verify_bytes)

    def _open(self, kind: type[F], verify_bytes: bool) -> F:
        for _ in range(10):
            found = self.pointer()
            if found is None:
                break
            id, name = found
            try:
                return kind(self.dir / name, id, verify_bytes, self._maps)
            except FileNotFoundError:
                # Replaced before it was opened: there is a newer one now.
                continue
            except WeightsCorrupt:
                self._maps.forget()  # the next call reads the file itself
                raise
        raise WeightsCorrupt(f"no weights can be opened in {self.dir}: nothing was published, or its file was removed")

    def pointer(self) -> tuple[WeightsVersion, str] | None:
        """The newest version and the name of its file."""
        path = self.dir / _POINTER
        with self._lock:
            try:
                stat = path.stat()
                mark = (stat.st_ino, stat.st_mtime_ns)
                if self._seen is None or self._seen[0] != mark:
                    pointer = json.loads(path.read_text())
                    id = WeightsVersion(int(pointer["branch"]), int(pointer["version"]), str(pointer["digest"]))
                    self._seen = (mark, id, str(pointer["file"]))
            except FileNotFoundError:
                return None
            except (ValueError, KeyError, TypeError) as error:
                raise WeightsCorrupt(f"{path} is not a pointer to weights: {error}") from error
            return self._seen[1], self._seen[2]
