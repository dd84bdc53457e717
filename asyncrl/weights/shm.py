"""Weights through a file in shared memory, for processes of one host.

    magic | tensor bytes, each aligned to 64 | index (msgpack) | trailer: index offset, length, digest, magic

The index stands at the end so that tensors are written as they come, one at a time. A version appears in two renames:
its file, complete, takes its name; then `latest.json` points at it. So a reader sees the old version or the new one;
a file that was cut short has no trailer, and one that was altered has another digest: both are WeightsCorrupt.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch

from asyncrl.errors import RunError
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion

MAGIC = b"asyncrlW"
ALIGN = 64
_TRAILER = struct.Struct("<QQ16s8s")
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    )
}
_POINTER = "latest.json"


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    digest: str

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * _DTYPES[self.dtype].itemsize


class ShmPublisher:
    """The one writer of `dir`. Keeps the `keep` newest versions; readers may go on using one that was removed."""

    def __init__(self, dir: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1")
        self.dir, self.keep = dir, keep
        dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left_over in dir.glob("*.tmp"):
            left_over.unlink()

    def publish(self, branch: int, version: int, named: Iterable[tuple[str, torch.Tensor]]) -> WeightsVersion:
        """Write, then rename. Raises RunError naming the folder when its file system is full."""
        path = self.dir / f"{branch:06d}-{version:010d}.weights"
        unfinished = path.with_suffix(".tmp")
        try:
            digest = _write(unfinished, named)
            os.replace(unfinished, path)
            id = WeightsVersion(branch, version, digest)
            pointer = self.dir / (_POINTER + ".tmp")
            pointer.write_text(json.dumps({"branch": branch, "version": version, "digest": digest, "file": path.name}))
            os.replace(pointer, self.dir / _POINTER)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise RunError(
                f"weights of version {version} cannot be written to {self.dir}: {error.strerror}. "
                "Free space there (shared memory of a container: raise --shm-size)."
            ) from error
        # Names sort by branch and version, except when a version is published a second time.
        for old in sorted(self.dir.glob("*.weights"))[: -self.keep]:
            if old != path:
                old.unlink()
        return id

    def latest(self) -> WeightsVersion | None:
        return ShmSubscriber(self.dir).latest()


class ShmSubscriber:
    """A reader of `dir`; any number of them, coming and going."""

    def __init__(self, dir: Path) -> None:
        self.dir = dir
        self._seen: tuple[tuple[int, int], WeightsVersion, str] | None = None
        self._lock = threading.Lock()

    def latest(self) -> WeightsVersion | None:
        """None before the first publication. Costs one stat while nothing is new."""
        found = self._pointer()
        return found[0] if found else None

    def open(self, verify: bool = True) -> ShmWeights:
        """Map the newest version. `verify` reads every byte once; without it only the index is checked."""
        for _ in range(10):
            found = self._pointer()
            if found is None:
                break
            id, name = found
            try:
                return ShmWeights(self.dir / name, id, verify)
            except FileNotFoundError:
                # Replaced between the look and the open: a newer one is there by now.
                continue
        raise WeightsCorrupt(f"no weights can be opened in {self.dir}: nothing was published, or its file was removed")

    def _pointer(self) -> tuple[WeightsVersion, str] | None:
        path = self.dir / _POINTER
        with self._lock:
            try:
                stat = path.stat()
                mark = (stat.st_ino, stat.st_mtime_ns)
                if self._seen is None or self._seen[0] != mark:
                    said = json.loads(path.read_text())
                    id = WeightsVersion(int(said["branch"]), int(said["version"]), str(said["digest"]))
                    self._seen = (mark, id, str(said["file"]))
            except FileNotFoundError:
                return None
            except (ValueError, KeyError, TypeError) as error:
                raise WeightsCorrupt(f"{path} is not a pointer to weights: {error}") from error
            return self._seen[1], self._seen[2]


class ShmWeights:
    """A mapped version. Its tensors are private views: writing to one changes nobody else's."""

    def __init__(self, path: Path, id: WeightsVersion, verify: bool) -> None:
        self.id = id
        self.path = path
        """Where it was; its publisher may have removed it since."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < len(MAGIC) + _TRAILER.size:
                raise WeightsCorrupt(f"{path} has {size} bytes: it is cut short")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._entries = _read_index(self._map, path)
        if _digest_of(self._entries) != id.digest:
            raise WeightsCorrupt(f"{path} holds weights of another digest than {id}")
        if verify:
            self._verify(path)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for e in self._entries:
            if e.nbytes == 0:
                yield e.name, torch.empty(e.shape, dtype=_DTYPES[e.dtype])
                continue
            dtype = _DTYPES[e.dtype]
            flat = torch.frombuffer(self._map, dtype=dtype, count=e.nbytes // dtype.itemsize, offset=e.offset)
            yield e.name, flat.view(e.shape)

    def close(self) -> None:
        """Forget the map; the memory goes with the last tensor that still looks into it."""
        del self._map
        self._entries = ()

    def _verify(self, path: Path) -> None:
        whole = memoryview(self._map)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            digests = pool.map(lambda e: _blake(whole[e.offset : e.offset + e.nbytes]), self._entries)
            for entry, digest in zip(self._entries, digests, strict=True):
                if digest != entry.digest:
                    raise WeightsCorrupt(f"{path}: the bytes of {entry.name} are not those of its digest")


def _write(path: Path, named: Iterable[tuple[str, torch.Tensor]]) -> str:
    entries: list[_Entry] = []
    with path.open("wb") as file:
        offset = file.write(MAGIC)
        for name, tensor in named:
            offset += file.write(b"\0" * (-offset % ALIGN))
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in _DTYPES:
                raise ValueError(f"{name} has dtype {dtype}, expected one of {', '.join(_DTYPES)}")
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            entries.append(_Entry(name, dtype, tuple(tensor.shape), offset, _blake(data)))
            offset += file.write(data)
        index = msgpack.packb([[e.name, e.dtype, e.shape, e.offset, e.digest] for e in entries])
        file.write(index)
        file.write(_TRAILER.pack(offset, len(index), bytes.fromhex(_blake(index)), MAGIC))
    return _digest_of(entries)


def _read_index(data: mmap.mmap, path: Path) -> tuple[_Entry, ...]:
    offset, length, digest, magic = _TRAILER.unpack(data[-_TRAILER.size :])
    if magic != MAGIC or data[: len(MAGIC)] != MAGIC or offset + length + _TRAILER.size != len(data):
        raise WeightsCorrupt(f"{path} has no trailer: it was cut short, or is no file of weights")
    index = data[offset : offset + length]
    if _blake(index) != digest.hex():
        raise WeightsCorrupt(f"{path}: the index is not that of its digest")
    entries = tuple(_Entry(n, d, tuple(s), o, h) for n, d, s, o, h in msgpack.unpackb(index))
    if any(e.dtype not in _DTYPES or e.offset + e.nbytes > offset for e in entries):
        raise WeightsCorrupt(f"{path}: the index points outside the file")
    return entries


def _digest_of(entries: Iterable[_Entry]) -> str:
    """Over the content alone, in the order of names, so that two writers of equal weights agree."""
    content: list[Any] = sorted([e.name, e.dtype, list(e.shape), e.digest] for e in entries)
    return _blake(msgpack.packb(content))


def _blake(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
