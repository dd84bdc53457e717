"""What a table declares: tasks, arms, budgets. Pure but for reading the tasks' config files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from learning.loop import train

ROOT = Path(__file__).parents[3]
TASKS = ROOT / "examples" / "tasks"
TUNED_ON = range(100, 105)
"""Seeds on which settings are chosen"""
JUDGED_ON = range(5)
"""Seeds of the rows that a claim rests on"""


def teacher_of(task: str) -> dict[str, Any]:
    """The fields that name the task's teacher (`make_models.py TASK --teacher`)."""
    return {"learner.teacher.path": str(TASKS / "models" / f"{task}-teacher")}


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things that a table compares."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config, by path: what tells this arm from the others."""
    lag: int = 0
    """Training steps between the version that samples and the one that trains, exactly."""
    make: Callable[[Config, int], dict[str, Any]] = train
    """Makes a row of a config and a lag."""
    only: tuple[str, ...] = ()
    """The tasks that it is run on; empty: all."""
    against: str = ""
    """The arm that it is compared with; empty: the table's first."""


@dataclass(frozen=True, slots=True)
class Table:
    """Arms x tasks x seeds, each one run; the first arm is what those are compared with that name no other."""

    name: str
    question: str
    tasks: Mapping[str, Mapping[str, Any]]
    """By task: fields of its config that all arms share."""
    arms: tuple[Arm, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that all tasks and arms share."""
    measures: tuple[str, ...] = ("held_out",)
    """Names in measures.py: the columns."""
    grid: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings, by name, that every arm is tried with on the seeds 100 to 104; `values` and the arms then hold what was
    chosen."""

    def tried(self) -> tuple[Arm, ...]:
        """Every arm with every setting of the grid."""
        return tuple(
            replace(arm, name=f"{arm.name}, {name}", values={**arm.values, **values})
            for arm in self.arms
            for name, values in self.grid.items()
        )

    def config(self, task: str, arm: Arm, seed: int) -> Config:
        """The config of one run. An arm's fields come last."""
        values = {**self.values, **self.tasks[task], **arm.values, "launch.seed": seed}
        return Config.load(TASKS / f"{task}.yaml", values)
