"""Samples of each batch for people to read (`tracking.rollouts`): chosen and copied by the step, written by a thread.

    step ──copies of a few groups' tokens──> queue ──> thread: text of the tokens ─> RUN/rollouts/<branch>-<batch>.jsonl

The step pays for the copies only. The thread runs at a lower priority; while it is behind, samples are skipped. What
cannot be taken or written is left out, and the next is tried; the first error is a warning, the others are counted:
reading is no reason to slow or to end a run.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.buffer.client import BatchReply
from asyncrl.config.launch import TrackingConfig
from asyncrl.learner.batch import Batch
from asyncrl.learner.step.record import Record
from asyncrl.learner.step.train_step import StepResult
from asyncrl.process.priority import lower_this_thread
from asyncrl.tracking.rollouts.sample import FORMAT, Rollout, RolloutRow
from asyncrl.tracking.rollouts.store import Store
from asyncrl.tracking.rollouts.text import TokenText
from asyncrl.trajectory import Row, Trajectory

log = logging.getLogger(__name__)

ROW_TOKENS = 32_768
"""Tokens of one row that are kept."""
QUEUED = 4
"""Batches that wait for the thread; with more of them it is behind."""
CLOSE_S = 10.0
"""Seconds that the end of the learner waits for the last samples."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """One chosen trajectory, with copies of what the step recorded about its tokens."""

    trajectory: Trajectory
    digest: str
    weight: float
    recorded: list[dict[str, Tensor]]
    """By row: learner_logprobs, weights, advantages and loss_mask."""


class Samples:
    """Takes the samples on rank 0, whose record holds every token of the batch."""

    def __init__(self, folder: Path, config: TrackingConfig, text: Callable[[], TokenText]) -> None:
        """`text` is called in the thread, once if it raises nothing."""
        self._folder, self._config, self._text = folder, config, text
        self._queue: queue.Queue[Callable[[Store, TokenText], None] | None] = queue.Queue(QUEUED)
        self._thread: threading.Thread | None = None
        self.skipped = 0
        """Batches without samples since the thread was behind."""
        self.errors = 0
        """Samples without text, batches that could not be taken or written, and attempts to open the folder."""

    def take(self, b: int, reply: BatchReply, batch: Batch, result: StepResult) -> None:
        """Takes samples of batch `b`; `reply` holds the whole of it."""
        if self._config.rollouts == 0 or (self._thread is not None and not self._thread.is_alive()):
            return
        if self._queue.full():
            self.skipped += 1
            return
        taken: list[_Taken] = []
        with self._counting_errors():
            taken = _taken(chosen(b, len(reply.groups), self._config.rollouts), reply, batch, result.record)
        if not taken:
            return

        def write(store: Store, text: TokenText) -> None:
            rollouts = []
            for one in taken:
                with self._counting_errors():
                    rollouts.append(_rollout(b, reply, result.outcome, one, text))
            store.write(rollouts)

        self._queue.put_nowait(write)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits for what is queued, at most `CLOSE_S`."""
        if self._thread is None:
            return
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            log.warning("tracking.rollouts: the samples of the last batches were not written within %g s", CLOSE_S)
        if self.errors > 1:
            log.info("tracking.rollouts: %d errors left samples out", self.errors)

    def _work(self) -> None:
        with self._counting_errors():
            lower_this_thread()
        opened = self._open()
        while (write := self._queue.get()) is not None:
            opened = opened or self._open()
            if opened is not None:
                with self._counting_errors():
                    write(*opened)

    def _open(self) -> tuple[Store, TokenText] | None:
        with self._counting_errors():
            return Store(self._folder, self._config.rollouts_mb), self._text()
        return None

    @contextlib.contextmanager
    def _counting_errors(self) -> Iterator[None]:
        """Counts an error of its body, and warns of the first."""
        try:
            yield
        except Exception as error:  # the run goes on, whatever a disk or a tokenizer raises
            self.errors += 1
            if self.errors == 1:
                why = f"{type(error).__name__}: {error}"
                log.warning("tracking.rollouts: some samples are left out, later errors are only counted: %s", why)


def chosen(b: int, groups: int, count: int) -> list[int]:
    """Places of the sampled groups in batch `b`, ascending: the same whenever it is redone.

    >>> chosen(3, 8, 2) == chosen(3, 8, 2), chosen(0, 2, 5)
    (True, [0, 1])
    """
    return sorted(random.Random(b).sample(range(groups), min(count, groups)))


def _taken(places: Sequence[int], reply: BatchReply, batch: Batch, record: Record) -> list[_Taken]:
    """The trajectories of these groups, in the batch's order."""
    numbers = {reply.groups[place] for place in places}
    with_digest = zip(reply.trajectories, reply.digests, reply.weights, strict=True)
    members = {(t.id.group, t.id.index): (t, digest, weight) for t, digest, weight in with_digest}
    place = {group: i for i, group in enumerate(reply.groups)}
    # As `flatten` orders them: an episode's number in the batch is its place here.
    order = sorted(members, key=lambda key: (place[key[0]], key[1]))
    ends = batch.lengths.cumsum(0).tolist()
    taken = []
    for episode, key in enumerate(order):
        if key[0] in numbers:
            rows = (batch.episodes == episode).nonzero()[:, 0].tolist()
            spans = [slice(ends[row] - int(batch.lengths[row]), ends[row]) for row in rows]
            taken.append(_Taken(*members[key], [_recorded(batch, record, span) for span in spans]))
    return taken


def _recorded(batch: Batch, record: Record, span: slice) -> dict[str, Tensor]:
    span = slice(span.start, min(span.stop, span.start + ROW_TOKENS))
    return {
        "learner_logprobs": _on(batch, record.proximal, span),
        "weights": _on(batch, record.weights, span),
        "advantages": _on(batch, record.advantages, span),
        "loss_mask": batch.mask[span] & record.keep[span],
    }


def _on(batch: Batch, values: Tensor, span: slice) -> Tensor:
    """A copy of the values of sampled tokens, 0 on the others, where they mean nothing."""
    return torch.where(batch.sampled[span], values[span].to(torch.float32), 0.0)


def _rollout(b: int, reply: BatchReply, outcome: str, taken: _Taken, text: TokenText) -> Rollout:
    t = taken.trajectory
    return Rollout(
        format=FORMAT,
        branch=reply.branch,
        batch=b,
        version=reply.version,
        outcome=outcome,
        group=t.id.group,
        index=t.id.index,
        attempt=t.attempt,
        actor=t.actor,
        task_id=t.task_id,
        env=t.env,
        reward=t.reward,
        rewards=dict(t.rewards),
        turns=t.turns,
        stop_reason=t.stop_reason,
        group_weight=taken.weight,
        digest=taken.digest,
        rows=[_row(row, recorded, text) for row, recorded in zip(t.rows, taken.recorded, strict=True)],
        timings=dict(t.timings),
        metrics=dict(t.metrics),
        turn_records=list(t.turn_records),
        turn_rewards=list(t.turn_rewards),
    )


def _row(row: Row, recorded: dict[str, Tensor], text: TokenText) -> RolloutRow:
    ids = row.token_ids[:ROW_TOKENS].tolist()
    words, ends = text.split(ids)
    return RolloutRow(
        text=words,
        ends=ends,
        token_ids=ids,
        sampled=row.mask[:ROW_TOKENS].tolist(),
        versions=row.versions[:ROW_TOKENS].tolist(),
        logprobs=row.logprobs[:ROW_TOKENS].tolist(),
        cut=max(len(row) - ROW_TOKENS, 0),
        **{name: values.tolist() for name, values in recorded.items()},
    )
