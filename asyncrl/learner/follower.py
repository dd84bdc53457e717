"""Every rank of the learner but the first: it follows the orders of rank 0.

rank 0 ──order──> wait | load | train | publish | save | end
                                 │
       buffer ──its share────────┴─> the whole batch, gathered from all ranks ──> train_step, like the others

unblocked by   an order; without any, it ends after `learner.collective_s` plus the longer of
               `launch.restart_window_s` and `learner.checkpoint_s`
"""

from __future__ import annotations

import logging
from pathlib import Path

from asyncrl.buffer.client import BatchReply, BufferClient
from asyncrl.buffer.client.retry import through_outages
from asyncrl.errors import RunError
from asyncrl.learner.checkpoints.background import Background
from asyncrl.learner.ranks import Order, Ranks
from asyncrl.learner.trainer import Trainer
from asyncrl.tracking.reporter import Reporter

log = logging.getLogger(__name__)


class Follower:
    """A rank above 0."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        ranks: Ranks,
        buffer: BufferClient,
        reporter: Reporter,
        patience_s: float,
        checkpoint_s: float = 1800.0,
    ) -> None:
        """`patience_s`: longest outage of the buffer. `checkpoint_s`: longest time to write a checkpoint."""
        self._trainer, self._ranks, self._buffer, self._reporter = trainer, ranks, buffer, reporter
        self._patience_s = patience_s
        self._writing = Background(checkpoint_s)

    def run(self) -> None:
        """Returns at the order to end. Raises RunError."""
        self._reporter.ready()
        self._reporter.waiting("orders", "learner")
        while (order := self._ranks.next()).do != "end":
            if order.do == "wait":
                continue
            self._reporter.waiting(None)
            match order.do:
                case "load":
                    self._trainer.load(Path(order.path))
                case "save":
                    self._writing.begin(self._trainer.snapshot(Path(order.path)))
                case "publish":
                    for _ in self._trainer.backend.weights():
                        pass
                case "train":
                    self._trainer.step(self._ranks.gather(self._share(order)), order.version)
            self._reporter.waiting("orders", "learner")
        self._writing.settle()

    def _share(self, order: Order) -> BatchReply:
        rank, size = self._ranks.rank, self._ranks.size
        reply = through_outages(
            lambda: self._buffer.batch(order.incarnation, order.batch, rank, size, wait_s=0.0), self._patience_s
        )
        if reply.state != "ready":
            raise RunError(f"batch {order.batch} is ready for rank 0 and {reply.state} for rank {rank}: {reply.why}")
        return reply
