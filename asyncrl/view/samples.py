"""The samples of a viewed run (`tracking.rollouts`): which trajectories have one, and how it is read.

All files together may be too large for memory, so each is read when it is asked for; the last few are kept.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import msgspec

from asyncrl.errors import RunError
from asyncrl.tracking.rollouts import store
from asyncrl.tracking.rollouts.sample import Rollout
from asyncrl.view.table import Key

LOOK_S = 1.0
"""Seconds between two looks at the folder."""
KEPT = 4
"""Files kept in memory."""


class _Place(msgspec.Struct):
    group: int
    index: int


_PLACE = msgspec.json.Decoder(_Place)


class Samples:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked = float("-inf")
        self._times: dict[store.Key, int] = {}
        self._held: dict[store.Key, tuple[Key, ...]] = {}
        self._of: dict[Key, list[store.Key]] = {}
        self._read: OrderedDict[store.Key, dict[Key, Rollout]] = OrderedDict()
        self.trouble = ""
        """The last file that could not be read, and why."""

    def keys(self) -> list[Key]:
        """The trajectories of which there is a sample."""
        self._look()
        return sorted(self._of)

    def batches(self, key: Key) -> list[store.Key]:
        """The (branch, batch) of the samples of one trajectory."""
        self._look()
        return self._of.get(key, [])

    def get(self, batch: store.Key, key: Key) -> Rollout | None:
        """One sample; None: it is not there any more, or damaged."""
        if batch not in self._read:
            try:
                rollouts = store.read(store.path_of(self._folder, batch))
            except RunError as error:
                self.trouble, rollouts = str(error), []
            self._read[batch] = {(r.group, r.index): r for r in rollouts}
            while len(self._read) > KEPT:
                self._read.popitem(last=False)
        return self._read[batch].get(key)

    def _look(self) -> None:
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        times = {}
        for batch, path in store.files(self._folder).items():
            with suppress(FileNotFoundError):  # removed just now
                times[batch] = path.stat().st_mtime_ns
                if self._times.get(batch) != times[batch]:
                    self._read.pop(batch, None)
                    self._held[batch] = self._places(path)
        if times != self._times:
            self._times = times
            self._of = {}
            for of, key in ((batch, key) for batch in times for key in self._held.get(batch, ())):
                self._of.setdefault(key, []).append(of)

    def _places(self, path: Path) -> tuple[Key, ...]:
        """Group and index of each sample in a file. Raises FileNotFoundError."""
        try:
            places = [_PLACE.decode(line) for line in path.read_bytes().splitlines()]
        except FileNotFoundError:
            raise
        except (OSError, msgspec.MsgspecError) as error:
            self.trouble = f"{path} cannot be read ({error}): its samples are not shown."
            return ()
        return tuple((place.group, place.index) for place in places)
