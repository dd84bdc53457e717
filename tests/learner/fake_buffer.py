"""A buffer for the learner's loop: the client's calls answered in this process, from batches made up in advance."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.buffer.client import BatchReply, BufferRefused, BufferTimeout, EvalReply, EvalSetReply, Start
from asyncrl.success import Success
from tests.learner.tiny import random_trajectory

EVAL_TASKS = 4


class FakeBuffer:
    """Survives the learner, as the real one does: give the same one to the learner that resumes."""

    def __init__(self, steps: int, groups: int = 4, size: int = 4) -> None:
        self.steps, self.groups, self.size = steps, groups, size
        self.incarnation = -1
        self.branch = 0
        self.outcomes: dict[int, str] = {}
        self.handed: dict[int, BatchReply] = {}
        self.published_versions: list[tuple[int, int]] = []
        self.evaluations: list[tuple[int, int]] = []
        self.done: list[EvalSetReply] = []
        self.open: list[tuple[int, int]] = []
        """Pins of the evaluations that are not done"""
        self.eval_every = 0
        self.asked_for_all: list[bool] = []
        """Whether each look at the evaluation asked for every actor"""
        self.checkpoints: list[int] = []
        self.asked: list[int] = []
        self.outages = 0
        """How many calls for a batch time out before one is answered"""
        self.waits = 0
        """How many are answered `waiting`"""
        self.poisoned: set[int] = set()
        self.fail_why = ""
        self.off_line: set[int] = set()
        """Batches at which no learner may resume"""
        self.on_batch: Any = None
        """Called with the number of the batch before it is answered"""
        self.on_evaluation: Any = None
        """Called with the pinned version; while it is set, only the first evaluation is ever done"""

    def hello(self, role: str) -> dict[str, Any]:
        return {}

    def version_before(self, b: int) -> int:
        return sum(outcome == "applied" for n, outcome in self.outcomes.items() if n < b)

    def start(self, resume_batch: int, version: int, branch: int | None, fresh: bool = False) -> Start:
        if resume_batch in self.off_line:
            raise BufferRefused("start", "unknown_checkpoint", f"batch {resume_batch} is no point of the line")
        assert version == self.version_before(resume_batch)
        self.incarnation += 1
        if fresh:
            self.branch += 1
            self.outcomes = {b: outcome for b, outcome in self.outcomes.items() if b < resume_batch}
            self.handed = {b: reply for b, reply in self.handed.items() if b < resume_batch}
        published = max((v for br, v in self.published_versions if br == self.branch), default=-1)
        return Start(self.incarnation, self.branch, resume_batch, version, published)

    def batch(self, incarnation: int, b: int, dp_rank: int, dp_size: int, wait_s: float) -> BatchReply:
        assert incarnation == self.incarnation
        self.asked.append(b)
        if self.on_batch is not None:
            self.on_batch(b)
        if self.outages:
            self.outages -= 1
            raise BufferTimeout("the buffer at nowhere did not answer batch within 0.0 s.")
        if self.fail_why:
            return self._reply("ended", self.fail_why, b, failed=True)
        if self.version_before(b) >= self.steps:
            return self._reply("ended", "all training steps are done", b)
        if self.waits:
            self.waits -= 1
            return self._reply("waiting", "2 of 4 groups are complete", b)
        if b in self.poisoned:
            self.outcomes[b] = "poison"
            return self._reply("skipped", f"batch {b} was skipped: poison", b)
        if b not in self.handed:
            self.handed[b] = self._made(b)
        return self.handed[b] if dp_size == 1 else share(self.handed[b], dp_rank, dp_size)

    def _made(self, b: int) -> BatchReply:
        rng = np.random.default_rng(b)
        v = self.version_before(b)
        numbers = tuple(range(b * self.groups, (b + 1) * self.groups))
        played = [random_trajectory(g, i, rng, versions=(max(0, v - 2), v)) for g in numbers for i in range(self.size)]
        return self._reply("ready", "", b, trajectories=played, groups=numbers)

    def _reply(self, state: Any, why: str, b: int, **given: Any) -> BatchReply:
        played = given.get("trajectories", [])
        return BatchReply(
            state=state,
            why=why,
            trajectories=played,
            weights=(1.0,) * len(played),
            digests=tuple(t.digest() for t in played),
            groups=given.get("groups", ()),
            replayed=given.get("replayed", ()),
            version=self.version_before(b),
            branch=self.branch,
            mask_before=None,
            checkpoint=False,
            failed=given.get("failed", False),
        )

    def finished(self, incarnation: int, b: int, outcome: str, told: Any = None) -> int:
        assert incarnation == self.incarnation
        assert self.outcomes.get(b, outcome) == outcome
        self.outcomes[b] = outcome
        return self.version_before(b + 1)

    def published(self, incarnation: int, branch: int, version: int, digest: str) -> int:
        assert incarnation == self.incarnation
        assert branch == self.branch
        self.published_versions.append((branch, version))
        due = self.eval_every and version and version % self.eval_every == 0
        if due and not self.open and (branch, version) not in self.evaluations:
            self.evaluations.append((branch, version))
            self.open.append((branch, version))
        return branch

    def checkpointed(self, incarnation: int, version: int, batch: int, path: str) -> None:
        assert incarnation == self.incarnation
        assert version == self.version_before(batch)
        os.mkdir(Path(path) / "buffer")
        self.checkpoints.append(batch)

    def evaluate(self, version: tuple[int, int]) -> None:
        assert version in self.published_versions
        assert not self.open
        if version not in self.evaluations:
            self.evaluations.append(version)
            self.open.append(version)

    def play_evaluation(self) -> None:
        """The actors play what is open."""
        for branch, version in self.open:
            measures = {
                way: Success(share, 0.1, 0.9, EVAL_TASKS, EVAL_TASKS, 0, share, 0.1, {})
                for way, share in (("sampled", 0.25), ("greedy", 0.75))
            }
            serial = len(self.done) + 1
            self.done.append(
                EvalSetReply(serial, "held_out", branch, version, (branch, version), "done", measures, 0, 0, 1.0)
            )
        self.open.clear()

    def evaluation(self, *, everyone: bool = False, lost: tuple[int, int] | None = None) -> EvalReply:
        self.asked_for_all.append(everyone)
        if lost is not None:
            self.open = [max(self.published_versions)]
        pinned = self.open[0] if self.open else None
        if pinned is not None and self.on_evaluation is not None:
            self.on_evaluation(pinned)
        if pinned is not None and everyone and not (self.on_evaluation is not None and pinned[1]):
            self.play_evaluation()
        pinned = self.open[0] if self.open else None
        total = 2 * EVAL_TASKS * len(self.open)
        return EvalReply(not self.open, pinned, 0, total, self.done[-1:], "no actor plays" if self.open else "")


def share(reply: BatchReply, rank: int, size: int) -> BatchReply:
    """Every `size`-th group of a batch."""
    mine = [i for i, t in enumerate(reply.trajectories) if t.id.group % size == rank]
    return dataclasses.replace(
        reply,
        trajectories=[reply.trajectories[i] for i in mine],
        weights=tuple(reply.weights[i] for i in mine),
        digests=tuple(reply.digests[i] for i in mine),
    )


class FakeReporter:
    def __init__(self) -> None:
        self.steps: list[tuple[int | None, dict[str, float]]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.causes: list[str | None] = []

    def ready(self) -> None:
        self.events.append(("ready", {}))

    def metrics(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        self.steps.append((step, dict(values)))

    def span(self, name: str, seconds: float, mark: int | None = None, end: float | None = None) -> None:
        """A trace is no part of these tests."""

    def waiting(self, cause: str | None, on: str = "") -> None:
        self.causes.append(cause)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for found, fields in self.events if found == kind]
