"""Naive PPO against decoupled PPO on old samples. See command.py.

python scripts/bench/learning/decoupled.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from learning.command import main
from learning.declared import Arm, Table

UNCORRECTED = {"learner.loss": "ppo", "learner.corrections": (), "learner.unsafe": True}
OBJECTIVES = {
    "decoupled": {},
    "naive": {**UNCORRECTED, "learner.proximal": "behaviour"},
    "uncorrected": UNCORRECTED,
}
"""decoupled: the default. naive: plain PPO, its ratio against the policy that sampled (AReaL's "naive PPO").
uncorrected: the ratio against the learner at the start of the step; who sampled is ignored."""
LAG = 16

TABLE = Table(
    name="decoupled",
    question="Do naive and uncorrected objectives fail on samples of lag 16, and does the default hold there?",
    tasks={"reversal": {}},
    values={
        "learner.steps": 40,
        "learner.schedule": "constant",
        "learner.groups_per_step": 8,
        "learner.minibatches": 2,
        "learner.lr": 1e-3,
        "buffer.max_staleness": LAG,
    },
    arms=tuple(Arm(name, values, LAG) for name, values in OBJECTIVES.items()),
    measures=("held_out", "lowest_after_best"),
)

if __name__ == "__main__":
    main(TABLE)
