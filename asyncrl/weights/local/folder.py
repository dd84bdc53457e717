"""A folder of policy versions in shared memory, without torch: one writer, any number of readers.

A version appears in two renames: its complete file gets its name, then `latest.json` points at it. So a reader sees the
old version or the new one; a truncated file has no trailer, and an altered one another digest: both are WeightsCorrupt.
The folder holds at most `keep` versions, one file for the next, and the version that is pinned, if any.
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
_PINNED = "pinned.json"
"""Points at the pinned version: a link to its file, which is then not reused."""


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
        self._unlink_pins(but=_pinned_file(dir))

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
        slot.rename(self.dir / f"{_stem(id)}.weights")
        if (same := self._slots.pop(slot.path, None)) is not None:
            same.close()  # the version was published before
        self._slots[slot.path] = slot
        self._point(_POINTER, id, slot.path.name)
        # Names sort by branch and version, except when a version is published a second time.
        names = sorted(name for name in os.listdir(self.dir) if name.endswith(".weights"))
        for old in [self.dir / name for name in names[: -self.keep]]:
            if old == slot.path:
                continue
            mine, pinned = self._slots.pop(old, None), old.stat().st_nlink > 1
            if mine is not None and not pinned and not any(path.suffix == ".spare" for path in self._slots):
                mine.rename(old.with_suffix(".spare"))
                self._slots[mine.path] = mine
            else:
                old.unlink()
                if mine is not None:
                    mine.close()

    def pin(self, version: tuple[int, int]) -> bool:
        """Keep (branch, version) until `unpin`, also for readers that start later. False: it is no longer there."""
        held = Watch(self.dir)
        at = held.pointer(_PINNED)
        if at is not None and at[0].order == version and (self.dir / at[1]).exists():
            return True
        latest = held.pointer()
        if latest is None or latest[0].order != version:
            return False
        file = self.dir / f"{Path(latest[1]).stem}.pinned"
        file.unlink(missing_ok=True)
        os.link(self.dir / latest[1], file)
        self._point(_PINNED, latest[0], file.name)
        self._unlink_pins(but=file.name)
        return True

    def keep_pinned(self, slot: ReusedFile, id: WeightsVersion) -> None:
        """Keep `slot`, which holds the complete version `id`, until `unpin`. The latest stays what it is."""
        slot.give()
        slot.rename(self.dir / f"{_stem(id)}.pinned")
        self._point(_PINNED, id, slot.path.name)
        self._unlink_pins(but=slot.path.name)
        slot.close()

    def unpin(self) -> None:
        (self.dir / _PINNED).unlink(missing_ok=True)
        self._unlink_pins(but="")

    def _point(self, pointer: str, id: WeightsVersion, file: str) -> None:
        unfinished = self.dir / (pointer + ".tmp")
        entry = {"branch": id.branch, "version": id.version, "digest": id.digest, "file": file}
        unfinished.write_text(json.dumps(entry))
        os.replace(unfinished, self.dir / pointer)

    def _unlink_pins(self, but: str) -> None:
        for path in self.dir.glob("*.pinned"):
            if path.name != but:
                path.unlink()

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
        self._seen: dict[str, tuple[tuple[int, int], WeightsVersion, str]] = {}
        self._maps = Maps()
        self._lock = threading.Lock()

    def latest(self) -> WeightsVersion | None:
        """The latest version; None before the first publication. Costs one stat if nothing changed."""
        found = self.pointer()
        return found[0] if found else None

    def pinned(self) -> WeightsVersion | None:
        """The version that is kept for an evaluation. Costs one stat if nothing changed."""
        found = self.pointer(_PINNED)
        return found[0] if found else None

    def file(self, verify_bytes: bool, version: tuple[int, int] | None = None) -> File:
        """The newest version, or the pinned one. Raises WeightsCorrupt."""
        return self._open(File, verify_bytes, version)

    def _open(self, kind: type[F], verify_bytes: bool, version: tuple[int, int] | None = None) -> F:
        for _ in range(10):
            found = self._at(version)
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

    def _at(self, version: tuple[int, int] | None) -> tuple[WeightsVersion, str] | None:
        """The newest version, or the one asked for if it is the newest or pinned."""
        for pointer in (_POINTER, _PINNED):
            found = self.pointer(pointer)
            if version is None or (found is not None and found[0].order == version):
                return found
        return None

    def pointer(self, name: str = _POINTER) -> tuple[WeightsVersion, str] | None:
        """The version that a pointer names, the newest one unless said, and the name of its file."""
        path = self.dir / name
        with self._lock:
            try:
                stat = path.stat()
                mark = (stat.st_ino, stat.st_mtime_ns)
                if name not in self._seen or self._seen[name][0] != mark:
                    pointer = json.loads(path.read_text())
                    id = WeightsVersion(int(pointer["branch"]), int(pointer["version"]), str(pointer["digest"]))
                    self._seen[name] = (mark, id, str(pointer["file"]))
            except FileNotFoundError:
                return None
            except (ValueError, KeyError, TypeError) as error:
                raise WeightsCorrupt(f"{path} is not a pointer to weights: {error}") from error
            return self._seen[name][1:]


def _stem(id: WeightsVersion) -> str:
    """Names of files sort by branch and version."""
    return f"{id.branch:06d}-{id.version:010d}"


def _pinned_file(dir: Path) -> str:
    """Name of the file that the pointer to the pinned version names; empty: there is none that can be read."""
    try:
        found = Watch(dir).pointer(_PINNED)
    except WeightsCorrupt:
        return ""
    return found[1] if found else ""
