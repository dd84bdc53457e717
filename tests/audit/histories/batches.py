"""How batches are filled, in what order, and how often a group is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.buffer.replaying import PRIORITIES, Replaying
from asyncrl.buffer.selection import zero_variance
from asyncrl.data.base import GroupResult
from tests.audit.simulated import Simulated
from tests.buffer.fakes import learner
from tests.buffer.scoring.fakes import SCORED, scores
from tests.buffer.scoring.fakes import bring as put_scores


def more(version: int, results: Sequence[GroupResult], tasks: Sequence[Any]) -> list[str]:
    """One more task after the first step."""
    return [json.dumps({"prompt": f"again, after {version}"})] if version == 1 else []


def interrupted(folder: Path) -> Simulated:
    """The buffer was opened again, attempts failed or were released, a filter dropped groups, a step was refused."""
    run = Simulated(folder, more, filters=(zero_variance,), filter_max_ratio=1.0, env_retries=0, eval_tasks=2)
    first = run.issue(8)
    run.put(first[0])
    run.put(first[0])
    run.buffer.release("actor-0", [(first[1].id, first[1].attempt)])
    run.buffer.fail("actor-0", first[2].id, first[2].attempt, "env_error", "away")
    for ticket in first[4:]:
        run.put(ticket, 1.0 if ticket.id.group == 2 else None)
    run.put(first[4])
    run.kill()
    for ticket in run.issue(5):
        run.put(ticket)
    run.put(first[2])
    run.step()
    run.checkpoint()
    run.rounds(1)
    run.evaluate()
    for ticket in run.issue(8):
        run.put(ticket)
    run.step("guard")
    run.kill()
    run.incarnation = learner(run.buffer, 2, 3, branch=0)
    run.rounds(1)
    run.checkpoint()
    run.issue(1)
    return run


def forked(folder: Path) -> Simulated:
    """A new branch began at batch 1."""
    run = Simulated(folder)
    run.rounds(1)
    run.checkpoint()
    run.rounds(2)
    for ticket in run.issue(5)[:4]:
        run.put(ticket)
    run.fork(1, 1)
    run.rounds(3)
    run.checkpoint()
    return run


def awaited(folder: Path) -> Simulated:
    """The learner waited for groups, for one of them in vain."""
    run = Simulated(folder, over_age="wait", wait_s=5.0, max_staleness=0)
    tickets = run.issue(4)
    for ticket in tickets[:3]:
        run.put(ticket)
    for run.now in (0.0, 10.0):
        assert run.buffer.batch(run.now, run.incarnation, 0).state == "waiting"
    for ticket in run.issue(2):
        run.put(ticket)
    run.step()
    run.rounds(2)
    run.checkpoint()
    return run


def used_twice(folder: Path) -> Simulated:
    run = Simulated(folder, max_uses=2)
    for ticket in run.issue(6):
        run.put(ticket)
    run.step()
    run.step()
    run.rounds(3)
    run.put(run.issue(2)[0])
    run.checkpoint()
    return run


def replayed(folder: Path) -> Simulated:
    """Used groups were drawn by unequal priorities; some yielded, some became too old; a step was refused, and the
    last batches were left for a branch."""
    replay = Replaying(2, PRIORITIES["spread"], exponent=0.7, beta=0.5, half_life=2.0)
    run = Simulated(folder, replay=replay, max_uses=4, max_staleness=3, capacity=16)

    def rounds(count: int) -> None:
        for _ in range(count):
            for ticket in run.issue(6):
                run.put(ticket, float(ticket.id.index * (1 + ticket.id.group % 4)))
            run.step()

    rounds(4)
    run.step("guard")
    rounds(1)
    run.kill()
    run.checkpoint()
    rounds(3)
    run.fork(6, 5)
    rounds(2)
    run.checkpoint()
    return run


def shown(folder: Path) -> Simulated:
    """Demonstrations beside groups: a step was refused, the buffer was opened again, and a branch began."""
    run = Simulated(folder, demonstrations_per_step=3)
    run.rounds(1)
    for ticket in run.issue(6):
        run.put(ticket)
    run.step("guard")
    run.checkpoint()
    run.kill()
    run.incarnation = learner(run.buffer, 1, 2, branch=0)
    run.rounds(2)
    run.checkpoint()
    run.fork(3, 2)
    run.rounds(2)
    run.checkpoint()
    return run


def supervised(folder: Path) -> Simulated:
    """Demonstrations alone, one in a batch."""
    run = Simulated(folder, demonstrations_per_step=1, groups_per_step=0)
    run.step()
    run.step("guard")
    run.checkpoint()
    run.step()
    run.kill()
    run.checkpoint()
    run.fork(2, 1)
    run.step()
    run.step()
    run.checkpoint()
    return run


def taught(folder: Path) -> Simulated:
    """A teacher on a server: a scorer was killed, leases lapsed and came back late, a branch began."""
    run = Simulated(folder, filters=(zero_variance,), max_staleness=2, **SCORED)
    run.log.flush_now()
    for ticket in run.issue(8):
        run.put(ticket)
    for ticket in run.issue(2):
        run.put(ticket, 1.0)  # which a filter drops
    run.score(1)
    (late,) = run.score(1, "scorer-1", bring=False)
    run.now += 100.0
    run.buffer.tick(run.now)
    run.score(2)
    put_scores(run.buffer, scores(run.buffer, late, "scorer-1", salt=9))
    run.step()
    run.checkpoint()
    (again,) = run.score(1, bring=False)
    run.buffer.scoring.joined("scorer-0")
    (back,) = run.score(1, bring=False)
    assert (back.group, back.attempt) == (again.group, 1)
    run.buffer.scoring.renew(run.now, "scorer-0", (), [(back.group, back.attempt)], "")
    run.score()
    run.kill()
    run.step("guard")
    run.checkpoint()
    for _ in range(2):
        for ticket in run.issue(6):
            run.put(ticket)
        run.score()
        run.step()
    run.fork(2, 1)
    for ticket in run.issue(6):
        run.put(ticket)
    run.score()
    run.step()
    run.checkpoint()
    for ticket in run.issue(4):
        run.put(ticket)
    run.score(1, bring=False)
    return run
