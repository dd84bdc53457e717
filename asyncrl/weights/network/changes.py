"""Makes deltas in a thread, since that takes longer than a request for a chunk may wait."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from asyncrl.weights.local.file import digest
from asyncrl.weights.local.folder import File
from asyncrl.weights.network import delta


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes from one version to the next (delta.py)."""

    data: bytes
    sum: str
    """Digest of `data`."""


@dataclass(frozen=True, slots=True)
class PendingDelta:
    """A version whose delta is being made."""

    file: File
    _made: Future[Delta | None]

    @property
    def ready(self) -> bool:
        return self._made.done()

    def changes(self) -> Delta | None:
        """The delta, once `ready`; None if sending the full file is better."""
        return self._made.result(0)


class Changes:
    """Makes one delta at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights changes")

    def between(self, old: File | None, new: File, worth: float) -> PendingDelta:
        """Start making the delta; `old` and `new` must stay open until it is ready. None instead of `old`: no delta.

        `worth` is the largest delta, as a share of the file.
        """
        return PendingDelta(new, self._thread.submit(_make, old, new, worth))

    def close(self) -> None:
        """Wait for the delta in the making, whose time the size of a file bounds."""
        self._thread.shutdown(cancel_futures=True)


def _make(old: File | None, new: File, worth: float) -> Delta | None:
    if old is None or len(old.map) != len(new.map) or not delta.worth_making(old.map, new.map, new.entries):
        return None
    made = delta.make(old.map, old.entries, new.map, new.entries)
    return Delta(made, digest(made)) if made is not None and len(made) < worth * len(new.map) else None
