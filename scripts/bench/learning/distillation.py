"""On-policy distillation against GRPO: what success 0.9 takes. See command.py.

    python examples/tasks/make_models.py reversal
    python examples/tasks/make_models.py reversal --teacher
    python scripts/bench/learning/distillation.py

A step has 64 new episodes in both arms: 8 groups of 8 for GRPO, 64 tasks for distillation, which compares nothing
within a group.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from learning.command import main
from learning.declared import Arm, Table, teacher_of

TABLE = Table(
    name="distillation",
    question="How much less than GRPO does on-policy distillation need to success 0.9?",
    tasks={"reversal": teacher_of("reversal")},
    values={"learner.schedule": "constant", "actors.slots": 64},
    arms=(
        Arm(
            "grpo",
            {
                "learner.steps": 150,
                "learner.lr": 5e-4,
                "learner.groups_per_step": 8,
                "learner.teacher.path": "",
                "eval.every": 6,
            },
        ),
        Arm(
            "distillation",
            {
                "learner.steps": 30,
                "learner.lr": 1e-3,
                "learner.groups_per_step": 64,
                "learner.group_size": 1,
                "eval.every": 2,
            },
        ),
    ),
    grid={f"lr {rate:g}": {"learner.lr": rate} for rate in (5e-4, 1e-3, 2e-3)},
    measures=(
        "held_out_reaches_0.9",
        "steps_to_held_out_0.9",
        "tokens_to_held_out_0.9",
        "cpu_s_to_held_out_0.9",
        "steps_to_greedy_0.9",
        "held_out",
    ),
)

if __name__ == "__main__":
    main(TABLE)
