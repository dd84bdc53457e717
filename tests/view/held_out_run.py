"""A made run with kept answers of two held-out tasks over some evaluations."""

from __future__ import annotations

from pathlib import Path

from asyncrl.buffer.record import to_record
from asyncrl.tracking.rollouts.held_out import FORMAT, About, Answers
from tests.view.made_run import MadeRun, Words, answer


def held_out_run(path: Path, due: tuple[int, ...], words: Words = answer) -> MadeRun:
    """`due`: the versions; the answer of task t at the n-th of them is that of trajectory n.t of the run."""
    made = MadeRun(path, words=words)
    for _ in range(-(-len(due) // 2)):
        made.step()
    kept = Answers(made.run.held_out, 2, 64.0)
    for place, version in enumerate(due):
        for task in (0, 1):
            for greedy in (False, True):
                t = made.put[place, 2 * task + greedy]
                of = ("dev", task, f"held-out {task}", int(greedy), greedy)
                kept.add(About(FORMAT, *of, 0, version, (0, version), t.reward), to_record(t))
    made.close()
    return made
