"""The learner's loop: batches in, policy versions out.

      start(checkpoint or initial weights) ─> publish ─> held-out set (before the first step)
         │
         ▼
    ┌─> batch b ──> train_step ──> finished(b) ──> publish? ──> checkpoint? ──┐
    └────────────────────────────── b + 1 ────────────────────────────────────┘
         │ ended: all steps done, or nothing left to learn; or SIGTERM
         ▼
      publish ─> checkpoint ─> held-out set (after the last step)

    takes     batch b and its outcome so far, from the buffer: the same answer however often it is asked
    gives     the outcome of b to the buffer, weights to the actors, checkpoints to the disk, numbers to the launcher
    unblocked by   enough complete groups within the staleness bound; for the held-out set, the actors' last episode

A learner that dies is started again, goes on from its last checkpoint and redoes the recorded batches: same data, same
outcomes, and what was published already is not published again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from asyncrl.buffer.client import BatchReply, BufferClient
from asyncrl.buffer.client.retry import through_outages
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.advantages.episodes import trajectory_weights
from asyncrl.learner.checkpoints import Checkpoints, Done, State, group_digests, read
from asyncrl.learner.evaluation import held_out
from asyncrl.learner.ranks import Order, Ranks
from asyncrl.learner.resume import begin, warn_of_other_rounding
from asyncrl.learner.step.metrics import step_metrics
from asyncrl.learner.trainer import Trainer
from asyncrl.tracking.reporter import Reporter
from asyncrl.weights.protocol import Publisher

log = logging.getLogger(__name__)
T = TypeVar("T")

BATCH_WAIT_S = 2.0
"""How long the buffer may hold a request for a batch; a signal to stop is seen after at most this."""
EVALUATION_POLL_S = 0.2


class Learner:
    """Rank 0: where there are others, it leads them (follower.py). `stop()` asks it to end after the step that runs."""

    def __init__(
        self,
        config: Config,
        *,
        trainer: Trainer,
        buffer: BufferClient,
        publisher: Publisher,
        reporter: Reporter,
        checkpoints: Checkpoints,
        save_tokenizer: Callable[[Path], None],
        ranks: Ranks | None = None,
    ) -> None:
        self._config, self._trainer, self._ranks = config, trainer, ranks or Ranks()
        self._buffer, self._publisher, self._reporter = buffer, publisher, reporter
        self._checkpoints, self._save_tokenizer = checkpoints, save_tokenizer
        self._stopping = False
        self._done: list[Done] = []
        self._version, self._batch, self._branch = 0, 0, 0
        self._incarnation = -1
        self._published = -1
        self._saved = 0
        """The batch that the newest checkpoint wants next"""
        self._tokens, self._skipped = 0, 0
        self._last_finished = time.perf_counter()

    def stop(self) -> None:
        self._stopping = True

    def run(self, *, resume: bool, fresh: Path | None = None) -> None:
        """Returns at the end of the run, or after a checkpoint when told to stop. `fresh`: the checkpoint at which a
        new branch begins. Raises RunError."""
        self._play(resume, fresh)
        self._ranks.order(Order("end"))

    def _play(self, resume: bool, fresh: Path | None) -> None:
        self._start(resume, fresh)
        latest = self._publisher.latest()
        if self._published < 0 or latest is None or latest.order < (self._branch, self._published):
            # Nothing was ever published on this branch, or what was has gone with the memory that held it.
            self._publish()
        self._reporter.ready()
        if self._batch == 0:
            self._evaluate("start")
        why = self._train()
        if why is None:
            self._checkpoint(wait=True)
            log.info("stopped at version %d, batch %d", self._version, self._batch)
            return
        self._publish()
        self._checkpoint(wait=True)
        self._evaluate("end")
        if self._stopping:
            return
        self._reporter.event("ended", step=self._version, why=why)
        log.info("ended at version %d: %s", self._version, why)

    def _start(self, resume: bool, fresh: Path | None) -> None:
        self._reporter.waiting("buffer", "buffer")
        self._ask(lambda: self._buffer.hello("learner"))
        origin, begun = begin(
            self._checkpoints.folder,
            lambda *point: self._ask(lambda: self._buffer.start(*point)),
            resume=resume,
            fresh=fresh,
        )
        self._incarnation, self._branch, self._published = begun.incarnation, begun.branch, begun.published
        self._reporter.waiting(None)
        if origin is not None:
            state, self._done = read(origin)
            self._ranks.order(Order("load", str(origin)))
            self._trainer.load(origin)
            self._version, self._batch, self._saved = state.version, state.batch, state.batch
            warn_of_other_rounding(state, self._config.learner)
            self._reporter.event("resumed", step=self._version, checkpoint=str(origin))
        where = origin or f"the model at model.path ({self._config.model.path})"
        log.info(
            "incarnation %d at version %d, batch %d, from %s", begun.incarnation, self._version, self._batch, where
        )

    def _train(self) -> str | None:
        """Why the run is over, or None when told to stop."""
        why = ""
        while not self._stopping:
            self._tell_checkpoints()
            self._reporter.waiting("batch", why or "buffer")
            reply = self._ask(self._request)
            why = reply.why
            if reply.branch != self._branch:
                # History forked: what was published on the old branch counts no more.
                log.warning("a new branch, %d, begins at version %d", reply.branch, self._version)
                self._reporter.event("branch", step=self._version, branch=reply.branch)
                self._branch, self._published = reply.branch, -1
                self._publish()
            match reply.state:
                case "waiting":
                    self._ranks.order(Order("wait"))
                case "ended":
                    if reply.failed:
                        raise RunError(f"the run cannot go on: {reply.why}")
                    return reply.why
                case "skipped":
                    self._done.append(Done(self._batch, "skipped", {}))
                    self._reporter.event("skipped", batch=self._batch, why=reply.why)
                    self._batch += 1
                case "ready":
                    self._reporter.waiting(None)
                    self._step(reply)
                    if reply.checkpoint or self._batch - self._saved >= self._config.learner.checkpoint_every:
                        self._checkpoint()
        return None

    def _request(self) -> BatchReply:
        return self._buffer.batch(self._incarnation, self._batch, 0, self._ranks.size, wait_s=BATCH_WAIT_S)

    def _step(self, reply: BatchReply) -> None:
        if reply.version != self._version:
            raise RunError(
                f"batch {self._batch} is for version {reply.version}, the learner holds {self._version}: the ledger "
                "and the checkpoint do not belong together. Resume from a checkpoint of this run."
            )
        order = Order("train", incarnation=self._incarnation, batch=self._batch, version=self._version)
        self._ranks.order(order)
        reply = self._ranks.whole(reply)
        batch, result = self._trainer.step(reply, self._version)
        config, objective = self._config, self._trainer.objective
        metrics = step_metrics(
            objective, batch, reply.trajectories, result, version=self._version, success=config.eval.success
        )
        b = self._batch
        version = self._ask(lambda: self._buffer.finished(self._incarnation, b, result.outcome))
        expected = self._version + (result.outcome == "applied")
        if version != expected:
            raise RunError(f"after batch {b} the buffer counts version {version}, the learner {expected}")
        groups = group_digests([t.id.group for t in reply.trajectories], reply.digests)
        weights = trajectory_weights(result.record.weights, batch, reply.groups)
        self._done.append(Done(b, result.outcome, groups, weights))
        self._version, self._batch = version, b + 1
        if result.outcome == "guard":
            self._skipped += 1
            log.warning("batch %d is skipped, version stays %d: %s", b, version, result.why)
            self._reporter.event("guard", batch=b, step=version, why=result.why)
            self._reporter.metrics({"weights/skipped": self._skipped})
            return
        self._tokens += int(batch.mask.sum())
        now = time.perf_counter()
        metrics |= {
            "throughput/tokens_trained": self._tokens,
            "throughput/step_s": now - self._last_finished,
            "weights/skipped": self._skipped,
        }
        self._last_finished = now
        if version % config.weights.every == 0:
            self._publish()
        self._reporter.metrics(metrics, step=version)

    def _publish(self) -> None:
        """Make the current version available to the actors, unless they can have it, or a newer one, already."""
        latest = self._publisher.latest()
        here = (self._branch, self._version)
        if self._published >= self._version and latest is not None and latest.order >= here:
            return
        self._reporter.waiting("publish")
        begun = time.perf_counter()
        sizes: list[int] = []

        self._ranks.order(Order("publish"))

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._trainer.backend.weights():
                sizes.append(tensor.nbytes)
                yield name, tensor

        sent = self._publisher.publish(self._branch, self._version, counted())
        seconds = time.perf_counter() - begun
        self._ask(lambda: self._buffer.published(self._incarnation, sent.branch, sent.version, sent.digest))
        self._published = max(self._published, self._version)
        self._reporter.waiting(None)
        published = {"weights/publish_s": seconds, "weights/bytes": sum(sizes)}
        self._reporter.metrics(published | {"weights/published_version": self._version})
        self._reporter.event("published", step=self._version, branch=self._branch, digest=sent.digest)

    def _checkpoint(self, *, wait: bool = False) -> None:
        """Begins one, unless the newest is of this batch; `wait`: until it is there."""
        if self._batch == self._saved:
            self._checkpoints.settle()
            self._tell_checkpoints()
            return
        self._reporter.waiting("checkpoint")
        state = State(
            self._version, self._batch, self._branch, self._config.learner.threads, self._config.learner.ranks
        )

        def save(folder: Path) -> Callable[[], None]:
            self._ranks.order(Order("save", str(folder)))
            write = self._trainer.snapshot(folder)

            def whole() -> None:
                write()
                self._save_tokenizer(folder / "hf")

            return whole

        def announce(folder: Path) -> None:
            arguments = (self._incarnation, self._version, self._batch, str(folder))
            self._ask(lambda: self._buffer.checkpointed(*arguments))

        self._checkpoints.begin(state, self._done, save, announce)
        self._saved = self._batch
        if wait:
            self._checkpoints.settle()
        self._reporter.waiting(None)
        self._tell_checkpoints()

    def _tell_checkpoints(self) -> None:
        """Those that have become complete."""
        for version, path in self._checkpoints.there():
            self._reporter.event("checkpoint", step=version, path=str(path))
            log.info("checkpoint %s", path)

    def _evaluate(self, label: str) -> None:
        """Play the held-out set on the version that was just published, and report it."""
        if self._config.eval.tasks == 0 or self._stopping:
            return
        # A run that is given more steps, or begins a new branch, ends, and is evaluated, a second time.
        name = label if label == "start" else f"{label}-{self._version}" + (f"-{self._branch}" if self._branch else "")
        patience_s = self._config.actors.episode_s
        self._reporter.waiting("evaluation", "actors")
        self._ask(lambda: self._buffer.evaluate((self._branch, self._version), name))
        finished, since = -1, time.monotonic()
        while not (reply := self._ask(lambda: self._buffer.evaluation(name))).done:
            if self._stopping:
                return
            if reply.finished != finished:
                finished, since = reply.finished, time.monotonic()
            if time.monotonic() - since > patience_s:
                raise RunError(
                    f"the evaluation at version {self._version} stands at {reply.finished} of {reply.total} episodes "
                    f"for actors.episode_s = {patience_s:g} s: {reply.why or 'no actor plays it'}"
                )
            self._ranks.order(Order("wait"))
            self._reporter.waiting("evaluation", reply.why or f"{reply.finished} of {reply.total} episodes")
            time.sleep(EVALUATION_POLL_S)
        self._reporter.waiting(None)
        values, counts = held_out(reply.results, reward=self._config.eval.success)
        self._reporter.metrics(values, step=self._version)
        self._reporter.event("eval", label=label, step=self._version, failed=reply.total - len(reply.results), **counts)
        log.info("held-out set at version %d (%s): %s", self._version, label, counts)
        self._last_finished = time.perf_counter()

    def _ask(self, call: Callable[[], T]) -> T:
        def again() -> bool:
            self._reporter.waiting("buffer", "buffer")
            return not self._stopping

        return through_outages(call, self._config.launch.restart_window_s, again)
