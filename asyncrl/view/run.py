"""One viewed run: what is known of it so far, and the answers to the page's questions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

from asyncrl.buffer.client.pages import MOST_BATCHES
from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.rollouts.sample import Rollout
from asyncrl.tracking.rollouts.text import TokenText, model_text
from asyncrl.trajectory import Trajectory
from asyncrl.view.detail import detail
from asyncrl.view.held_out import HeldOut
from asyncrl.view.samples import Samples
from asyncrl.view.source import Source, Unavailable, open_source
from asyncrl.view.table import COLUMNS, Key, Rows, table

LOOK_S = 5.0
"""Seconds between two looks whether a run that is over lives again."""
NOT_KEPT = (
    "Its payload is not kept any more, and it is not among the samples. buffer.keep: all keeps every payload; "
    "tracking.rollouts says of how many groups per step samples stay."
)


class ViewedRun:
    """Any thread may call it; one is served at a time."""

    def __init__(
        self, run: RunFolder, open_: Callable[[RunFolder], Source] = open_source, text: TokenText | None = None
    ) -> None:
        """`text`: of its tokens; default: that of the model's tokenizer. Raises RunError for a run that cannot be
        read."""
        self.folder = run
        self.config: Config = run.load_config()
        self._open, self._given_text = open_, text
        self._launch, self._source = run.id, open_(run)
        self._next_look = time.monotonic() + LOOK_S
        self._lock = threading.RLock()
        self._rows = Rows()
        self._samples = Samples(run.rollouts)
        self._held_out = HeldOut(run.held_out)
        self.revision = 0
        """Grows with every change."""
        self.trouble = ""
        """Why the newest rows are missing; empty: they are not."""
        self.refresh()
        if self.trouble:
            raise RunError(self.trouble)

    @property
    def live(self) -> bool:
        return self._source.live

    def close(self) -> None:
        with self._lock:
            self._source.close()

    def refresh(self) -> None:
        """Takes what is new: of a run that is over, all of it, once, and again when a launch has continued it."""
        with self._lock:
            if self.revision and not self._source.live:
                if time.monotonic() >= self._next_look:
                    self._look()
                return
            try:
                changed = self._take()
                self.trouble = ""
            except Unavailable as error:
                changed, self.trouble = False, str(error)
                self._look()
            except RunError as error:
                changed, self.trouble = False, str(error)
            if changed or not self.revision:
                self.revision += 1

    def _take(self) -> bool:
        """Whether there was anything new."""
        before = len(self._rows.branches)
        group, batch = self._rows.unsettled
        changed = False
        while True:
            page = self._source.page(group, batch)
            if before and len(page.branches) != before:  # a branch began: what had ended may have another end now
                self._rows, before, group, batch = Rows(), 0, 0, 0
                continue
            changed |= bool(page.groups or page.batches)
            self._rows.add(page)
            if page.next is None and len(page.batches) < MOST_BATCHES:
                return changed
            group = page.next if page.next is not None else max(self._rows.groups, default=-1) + 1
            batch = max(self._rows.batches, default=-1) + 1

    def _look(self) -> None:
        """Looks whether the run has ended, lives again, or is of another launch, and takes its rows from there."""
        self._next_look = time.monotonic() + LOOK_S
        try:
            launch, source = self.folder.id, self._open(self.folder)
        except (RunError, OSError) as error:
            self.trouble = self.trouble or str(error)
            return
        same = (source.live, launch) == (self._source.live, self._launch)
        if same and (source.live or not self.trouble):
            source.close()
            return
        self._source.close()
        self._launch, self._source = launch, source
        before, self._rows = self._rows, Rows()
        try:
            self._take()
            self.trouble = ""
        except RunError as error:
            self._rows, self.trouble = before, str(error)
        self.revision += 1

    def about(self) -> dict[str, Any]:
        with self._lock:
            line = self._rows.line
            return {
                "name": self.folder.name,
                "path": str(self.folder.path),
                "live": self.live,
                "trouble": " ".join(filter(None, (self.trouble, self._samples.trouble, self._held_out.trouble))),
                "revision": self.revision,
                "steps": sum(batch.outcome == "applied" for batch in line),
                "batches": [
                    [b.serial, b.b, b.branch, b.version, b.outcome, b.released, b.groups]
                    for b in sorted(self._rows.batches.values(), key=lambda b: b.serial)
                ],
                "columns": COLUMNS,
                "sampled": self._samples.keys(),
                "held_out": self._held_out.episodes(),
            }

    def table(self) -> list[list[Any]]:
        with self._lock:
            return table(self._rows)

    def keys(self) -> list[Key]:
        """Every stored trajectory."""
        with self._lock:
            return sorted(self._rows.trajectories)

    def show(self, group: int, index: int, batch: int | None = None) -> dict[str, Any]:
        """One trajectory, with the record of the use in the batch with this serial, or of the last one that has a
        record. Raises Unavailable."""
        trajectory, sample = self.find(group, index, batch)
        shown = detail(trajectory, sample, self._text)
        return shown | {"note": "" if self._text is not None else self.no_text}

    def answers(self, of_set: str, task: int, index: int) -> list[dict[str, Any]]:
        """The answers of one held-out episode over the evaluations."""
        with self._lock:
            return self._held_out.answers((of_set, task, index), self._text)

    def find(self, group: int, index: int, batch: int | None = None) -> tuple[Trajectory | None, Rollout | None]:
        """What is there of one trajectory. Raises Unavailable if nothing is."""
        with self._lock:
            entry = self._rows.trajectories.get((group, index))
            if entry is None:
                raise Unavailable(f"The run has no trajectory {group}.{index}.")
            sample = self._sample((group, index), batch)
            try:
                trajectory = self._source.record(group, index)
            except Unavailable:
                if sample is None:
                    raise
                trajectory = None
        if sample is not None and sample.digest != entry.digest:
            sample = None
        if trajectory is None and sample is None:
            raise Unavailable(NOT_KEPT)
        return trajectory, sample

    def _sample(self, key: Key, batch: int | None) -> Rollout | None:
        found = []
        for branch, b in self._samples.batches(key):
            entry = self._rows.batch_of(branch, b)
            if entry is not None and batch in (None, entry.serial):
                found.append((entry.released, -entry.serial, -branch, b))
        for _, _, branch, b in sorted(found):
            if (sample := self._samples.get((-branch, b), key)) is not None:
                return sample
        return None

    @cached_property
    def _text(self) -> TokenText | None:
        if self._given_text is not None:
            return self._given_text
        try:
            return model_text(self.config.model)
        except ConfigError as error:
            self.no_text = f"Tokens are shown by their numbers: {error}"
            return None

    no_text = ""
    """Why tokens are shown by their numbers."""

    def words(self, trajectory: Trajectory | None, sample: Rollout | None, most: int) -> str:
        """The text of a trajectory, cut to `most` characters."""
        if trajectory is None:
            return sample.text[:most] if sample is not None else ""
        if self._text is None:
            return ""
        parts, left = [], most
        for row in trajectory.rows:
            parts.append(self._text.split(row.token_ids[:most].tolist())[0][:left])
            left -= len(parts[-1])
            if left <= 0:
                break
        return "\n".join(parts)
