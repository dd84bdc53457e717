"""Credit by turn against credit by episode. See command.py.

python scripts/bench/learning/credit.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from learning.command import main
from learning.declared import Arm, Table

TABLE = Table(
    name="credit",
    question="Does credit by turn learn more than credit by episode from the same number of steps?",
    tasks={"frozen_lake": {}, "chain": {"learner.lr": 2e-3}},
    values={"learner.steps": 40, "learner.schedule": "constant", "learner.groups_per_step": 8, "learner.lr": 1e-3},
    arms=(
        Arm("grpo", {"learner.advantage": "grpo"}),
        Arm("turn_returns", {"learner.advantage": "turn_returns"}),
        Arm("gigpo", {"learner.advantage": "gigpo"}),
    ),
    grid={"lr 5e-4": {"learner.lr": 5e-4}, "lr 1e-3": {"learner.lr": 1e-3}, "lr 2e-3": {"learner.lr": 2e-3}},
    measures=("held_out", "mean_success"),
)

if __name__ == "__main__":
    main(TABLE)
