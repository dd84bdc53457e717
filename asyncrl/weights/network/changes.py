"""What changed from one version to the next, found out in a thread: it takes longer than a chunk may wait."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from asyncrl.weights.local.file import digest
from asyncrl.weights.local.folder import File
from asyncrl.weights.network import delta


@dataclass(frozen=True, slots=True)
class Delta:
    """What makes a new version of an old one (delta.py)."""

    data: bytes
    sum: str
    """Its digest."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A version of which it is being found out."""

    file: File
    _made: Future[Delta | None]

    @property
    def known(self) -> bool:
        return self._made.done()

    def changes(self) -> Delta | None:
        """None where the whole file is the better thing to send. Once `known`: waits for nothing."""
        return self._made.result(0)


class Changes:
    """One at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights changes")

    def between(self, old: File | None, new: File, worth: float) -> Coming:
        """`old` and `new` stay open until it is known. `worth`: the share of the file that a delta may have, at most.
        `old` None: there is nothing to find out."""
        return Coming(new, self._thread.submit(_make, old, new, worth))

    def close(self) -> None:
        """Waits for what is being made, which a file's size bounds."""
        self._thread.shutdown(cancel_futures=True)


def _make(old: File | None, new: File, worth: float) -> Delta | None:
    if old is None or len(old.map) != len(new.map) or not delta.worth_making(old.map, new.map, new.entries):
        return None
    made = delta.make(old.map, old.entries, new.map, new.entries)
    return Delta(made, digest(made)) if made is not None and len(made) < worth * len(new.map) else None
