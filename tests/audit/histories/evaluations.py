"""Evaluations during the run, what they are played with, and what they decide."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.choosing import Choosing
from asyncrl.config.held_out import HeldOutSet
from tests.audit.simulated import Simulated


def evaluated(folder: Path) -> Simulated:
    """Two sets are due at every step: played, skipped while they were open, begun again, and open at the end."""
    sets = (HeldOutSet("easy", 2, 1, False, 1.0), HeldOutSet("hard", 1, 2, True, 0.5, pass_at=(2,)))
    run = Simulated(folder, eval_sets=sets, eval_every=1, eval_reserved=1, env_retries=0)
    run.trained(1)
    assert [t.eval_set for t in run.evaluated(1)] == ["easy"] * 2 + ["hard"] * 3
    run.trained(2)
    run.evaluated(2, tickets=2)
    run.buffer.evaluation(lost=(0, 2))
    run.kill()
    run.evaluated(3, tickets=2)
    run.buffer.fail("actor-0", *run.failing(3), "env_error", "away")
    run.checkpoint()
    run.trained(1)
    run.evaluated(4, tickets=3)
    return run


def stopped(folder: Path) -> Simulated:
    """A result stopped the run, a branch went on, and another result stopped that one."""
    dev = ("dev", "sampled")
    sets = (HeldOutSet("dev", 2, 1, False, 1.0),)
    choosing = Choosing(stop_at=((dev, 1.0),), patience=((dev, 1),))
    run = Simulated(folder, eval_sets=sets, eval_every=1, eval_reserved=1, choosing=choosing)
    run.trained(1)
    run.evaluated(1, success=(1.0, 0.0))
    run.trained(1)
    run.checkpoint()
    run.evaluated(2, success=(1.0, 1.0))
    assert run.buffer.batch(run.now, run.incarnation, 2).state == "ended"
    run.kill()
    run.fork(2, 2)
    run.trained(1)
    run.evaluated(2, success=(0.0, 0.0))
    assert run.buffer.batch(run.now, run.incarnation, 3).state == "ended"
    return run
