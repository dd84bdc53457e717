"""The held-out set: the actors play it on one policy version, and its results become numbers."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.buffer.client import BufferRefused, EvalReply, EvalResult
from asyncrl.errors import RunError
from asyncrl.learner.ranks import Order
from asyncrl.learner.session import Session
from asyncrl.trajectory import succeeded

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Between two looks at how far the actors have come."""


def evaluate(session: Session, label: str) -> None:
    """Has the held-out set played on the version that was just published, and reports it."""
    if session.config.eval.tasks == 0 or session.stopping:
        return
    # A run that is given more steps, or begins a new branch, ends a second time, and is evaluated again.
    branch = f"-{session.branch}" if session.branch else ""
    name = label if label == "start" else f"{label}-{session.version}{branch}"
    session.reporter.waiting("evaluation", "actors")
    reply = _played(session, name) if _opened(session, name) else None
    if reply is None:
        return
    session.reporter.waiting(None)
    values, counts = held_out(reply.results, reward=session.config.eval.success)
    failed = reply.total - len(reply.results)
    session.reporter.metrics(values, step=session.version)
    session.reporter.event("eval", label=label, step=session.version, failed=failed, **counts)
    if failed:
        session.reporter.event("eval_failed", label=label, step=session.version, why=reply.why)
    log.info("held-out set at version %d (%s): %s", session.version, label, counts)


def _opened(session: Session, name: str) -> bool:
    """Opens the set, after another that a learner before this one has left open; False when the learner is told to
    stop. Raises BufferRefused when that one is not done within `actors.episode_s`."""
    deadline = time.monotonic() + session.config.actors.episode_s
    while not session.stopping:
        try:
            session.ask(lambda: session.buffer.evaluate((session.branch, session.version), name))
            return True
        except BufferRefused as error:
            if error.code != "eval_open" or time.monotonic() > deadline:
                raise
            session.ranks.order(Order("wait"))
            session.reporter.waiting("evaluation", str(error))
            time.sleep(POLL_S)
    return False


def _played(session: Session, name: str) -> EvalReply | None:
    """Waits for all episodes of the set; None when the learner is told to stop. Raises RunError when no episode ends
    for `actors.episode_s`."""
    patience_s = session.config.actors.episode_s
    finished, since = -1, time.monotonic()
    while not (reply := session.ask(lambda: session.buffer.evaluation(name))).done:
        if session.stopping:
            return None
        if reply.failed:
            raise RunError(f"the run cannot go on: {reply.why}")
        if reply.finished != finished:
            finished, since = reply.finished, time.monotonic()
        if time.monotonic() - since > patience_s:
            raise RunError(
                f"the evaluation at version {session.version} stands at {reply.finished} of {reply.total} episodes "
                f"for actors.episode_s = {patience_s:g} s: {reply.why or 'no actor plays it'}"
            )
        session.ranks.order(Order("wait"))
        session.reporter.waiting("evaluation", reply.why or f"{reply.finished} of {reply.total} episodes")
        time.sleep(POLL_S)
    return reply


@dataclass(frozen=True, slots=True)
class Success:
    """Share of held-out episodes that succeeded."""

    episodes: int
    share: float


def success(results: Sequence[EvalResult], *, greedy: bool, reward: str) -> Success | None:
    """Success of the greedy episodes, or of those sampled at the training temperature; None when there are none.

    `reward`: the reward that tells success (`eval.success`).
    """
    solved = [succeeded(r.reward, r.rewards, reward) for r in results if r.greedy == greedy]
    return Success(len(solved), statistics.fmean(solved)) if solved else None


def held_out(results: Sequence[EvalResult], *, reward: str) -> tuple[dict[str, float], dict[str, float]]:
    """Series, and fields of the event: shares and episodes, sampled and greedy."""
    values: dict[str, float] = {}
    counts: dict[str, float] = {}
    for kind, greedy in (("sampled", False), ("greedy", True)):
        succeeded_share = success(results, greedy=greedy, reward=reward)
        if succeeded_share is not None:
            values[f"reward/held_out_success_{kind}"] = succeeded_share.share
            counts |= {kind: succeeded_share.share, f"{kind}_episodes": succeeded_share.episodes}
    return values, counts
