"""Evaluations as the learner sees them: it has the held-out sets played before the first and after the last step, keeps
the version fetchable to which one is pinned during the run, and reports what was measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from asyncrl.buffer.client import EvalReply, EvalSetReply
from asyncrl.config.held_out import held_out_sets
from asyncrl.errors import RunError
from asyncrl.learner.ranks import Order
from asyncrl.learner.session import Session
from asyncrl.weights.protocol import Publisher

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Between two looks at how far the actors have come."""


class Evaluations:
    """Those of one incarnation of the learner."""

    def __init__(
        self, session: Session, publisher: Publisher, told: Callable[[EvalReply], None] = lambda reply: None
    ) -> None:
        """`told` is called with each answer of the buffer."""
        self._session, self._publisher, self._told = session, publisher, told
        self._names = [each.name for each in held_out_sets(session.config)]
        self._every = session.config.eval.every if self._names else 0
        self._reported: set[int] = set()
        """Serials of the sets whose results were reported."""
        self._open = False
        """Whether an evaluation may be open."""
        self._kept: tuple[int, int] | None = None

    def begin(self) -> None:
        """Plays the evaluation before the first step; behind it, takes over what an earlier incarnation has left open,
        and reports again what that one may not have reported.

        A set whose version this channel of weights cannot keep is played at once; one whose version the redone steps
        will make again waits for it.
        """
        if not self._names:
            return
        reply = self._look("step")
        if self._ahead(reply):
            return
        if self._session.batch == 0:
            self.play("start")
        elif not reply.done and reply.pinned != self._kept:
            self._wait("step")

    def publishes(self, version: int) -> bool:
        """Whether this version is published: by the cadence, or because an evaluation is due at it."""
        due = self._every > 0 and version > 0 and version % self._every == 0
        self._open |= due
        return due or version % self._session.config.weights.every == 0

    def look(self) -> None:
        """Called before each batch, and so before the next publication: keeps the pinned version, and reports the sets
        that are done. A new branch may have opened some."""
        if self._open or self._every:
            self._look("step")

    def play(self, label: str) -> None:
        """Has all actors finish what is open, and then play every set on the version that was just published."""
        session = self._session
        if not self._names or session.stopping:
            return
        if self._wait(label):
            session.ask(lambda: session.buffer.evaluate((session.branch, session.version)))
            self._wait(label)

    def _wait(self, label: str) -> bool:
        """Waits for all episodes of what is open; False when the learner is told to stop. Raises RunError when no
        episode ends for as long as one may last (`actors.episode_s`, `actors.episode_max_s`)."""
        session = self._session
        patience_s = session.config.actors.most_episode_s
        finished, since = -1, time.monotonic()
        session.reporter.waiting("evaluation", "actors")
        while not (reply := self._look(label, everyone=True)).done:
            if session.stopping:
                return False
            if reply.failed:
                raise RunError(f"the run cannot go on: {reply.why}")
            if reply.finished != finished:
                finished, since = reply.finished, time.monotonic()
            if time.monotonic() - since > patience_s:
                raise RunError(
                    f"the evaluation of {reply.pinned} stands at {reply.finished} of {reply.total} episodes "
                    f"for {patience_s:g} s, as long as one may last (actors.episode_s, actors.episode_max_s): "
                    f"{reply.why or 'no actor plays it'}"
                )
            session.ranks.order(Order("wait"))
            session.reporter.waiting("evaluation", reply.why)
            time.sleep(POLL_S)
        session.reporter.waiting(None)
        return not session.stopping

    def _look(self, label: str, everyone: bool = False) -> EvalReply:
        session = self._session
        reply = self._keep(session.ask(lambda: session.buffer.evaluation(everyone=everyone)), everyone)
        self._open = not reply.done
        self._told(reply)
        for each in reply.sets:
            if each.state in ("done", "failed") and each.serial not in self._reported:
                self._reported.add(each.serial)
                if each.due or not self._session.batch:  # before the first step it was reported before the first step
                    self._report(label, each)
        return reply

    def _ahead(self, reply: EvalReply) -> bool:
        """The pinned version is one that this incarnation has not made again yet."""
        return reply.pinned is not None and reply.pinned > (self._session.branch, self._session.version)

    def _keep(self, reply: EvalReply, everyone: bool) -> EvalReply:
        """Keeps the pinned version. One that is gone, and will not be made again, is said to be lost."""
        pinned = reply.pinned
        if pinned is None and self._kept is not None:
            self._publisher.unpin()
            self._kept = None
        if pinned is None or pinned == self._kept:
            return reply
        if self._publisher.pin(pinned):
            self._kept = pinned
            return reply
        latest = self._publisher.latest()
        if self._ahead(reply) or (latest is not None and latest.order == pinned):
            return reply
        log.warning("version %s is gone: the evaluation of it starts again", pinned)
        reply = self._session.ask(lambda: self._session.buffer.evaluation(everyone=everyone, lost=pinned))
        if reply.pinned is not None and self._publisher.pin(reply.pinned):
            self._kept = reply.pinned
        return reply

    def _report(self, label: str, played: EvalSetReply) -> None:
        reporter, label = self._session.reporter, "start" if played.due == 0 else label
        about = {"label": label, "set": played.name, "step": played.due, "branch": played.branch}
        if played.state == "failed":
            reporter.event("eval_failed", why="its version was lost each time that it was begun", **about)
            return
        values, counts = measured(played, first=played.name == self._names[0])
        reporter.metrics(values, step=played.due)
        version = {} if played.version == (played.branch, played.due) else {"played_by": list(played.version)}
        reporter.event("eval", failed=played.failed, **about, **version, **counts)
        if played.failed:
            last = f"; the last one: {played.failure}" if played.failure else ""
            why = f"{played.failed} {'episodes' if played.failed > 1 else 'episode'} failed in the environment{last}"
            reporter.event("eval_failed", why=why, **about)
        log.info("held-out set %s at version %d (%s): %s", played.name, played.due, label, counts)


def measured(played: EvalSetReply, *, first: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Series of a set that is done, and fields of the event: shares and episodes, sampled and greedy. `first`: it is
    the one that the terminal and the summary show."""
    of_set = f"reward/held_out/{played.name}"
    values: dict[str, float] = {f"{of_set}/seconds": played.seconds}
    counts: dict[str, float] = {}
    for way, m in played.measures.items():
        values |= {f"{of_set}/{way}": m.share, f"{of_set}/{way}_low": m.low, f"{of_set}/{way}_high": m.high}
        values[f"{of_set}/{way}_reward"] = m.reward
        counts |= {way: m.share, f"{way}_low": m.low, f"{way}_high": m.high, f"{way}_episodes": m.episodes}
        if first:
            values[f"reward/held_out_success_{way}"] = m.share
    if "sampled" in played.measures:
        passes = played.measures["sampled"].pass_at
        values |= {f"{of_set}/pass_at/{k}": share for k, share in passes.items()}
        counts |= {f"pass_at_{k}": share for k, share in passes.items()}
    if played.failed:
        values[f"{of_set}/failed"] = played.failed
    if played.skipped:
        values[f"{of_set}/skipped"] = played.skipped
    return values, counts
