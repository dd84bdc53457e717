"""The state that the parts of the learner's loop share, and requests that survive an outage of the buffer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from asyncrl.buffer.client import BatchReply, BufferClient
from asyncrl.buffer.client.retry import through_outages
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.ranks import Ranks
from asyncrl.tracking.reporter import Reporter

T = TypeVar("T")

BATCH_WAIT_S = 2.0
"""Longest time the buffer may hold a request for a batch; a signal to stop is noticed after at most this."""


class Session:
    """One incarnation of the learner."""

    def __init__(self, config: Config, buffer: BufferClient, reporter: Reporter, ranks: Ranks) -> None:
        self.config, self.buffer, self.reporter, self.ranks = config, buffer, reporter, ranks
        self.incarnation, self.branch, self.version = -1, 0, 0
        self.batch = 0
        """The one wanted next"""
        self.stopping = self.over = False
        """Whether the learner was told to stop; whether the run is over, with its last evaluation."""
        self._asked_at: float | None = None
        self._waited_s, self._ended_at = 0.0, time.perf_counter()
        """How long it waited for the last batch, and when the one before it ended."""

    def request_batch(self) -> BatchReply:
        """The buffer's answer to a request for this rank's share of the batch wanted next. Raises RunError if the batch
        is for another version than the learner's."""
        if self._asked_at is None:
            self._asked_at = time.perf_counter()
        reply = self.ask(
            lambda: self.buffer.batch(self.incarnation, self.batch, 0, self.ranks.size, wait_s=BATCH_WAIT_S)
        )
        if reply.state == "ready" and reply.version != self.version:
            raise RunError(
                f"batch {self.batch} is for version {reply.version}, the learner holds {self.version}: the ledger and "
                "the checkpoint do not belong together. Resume from a checkpoint of this run."
            )
        if reply.state == "ready":
            self._waited_s, self._asked_at = time.perf_counter() - self._asked_at, None
        return reply

    def waited(self, now: float) -> tuple[float, float]:
        """Seconds since the last call, or since the session began, and their share in which it waited for the last
        batch."""
        passed, self._ended_at = now - self._ended_at, now
        return max(0.0, passed), min(1.0, self._waited_s / passed) if passed > 0 else 0.0

    def ask(self, request: Callable[[], T]) -> T:
        """The buffer's answer, after an outage too. Raises its error once `launch.restart_window_s` is over, or when
        the learner is stopping."""

        def again() -> bool:
            self.reporter.waiting("buffer", "buffer")
            return not self.stopping

        return through_outages(request, self.config.launch.restart_window_s, again)
