"""The largest learning rate that still trains, over the lag: the bias of stale samples grows with lr times staleness
(2607.01083). See command.py.

python scripts/bench/learning/lr_law.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from learning.command import main
from learning.declared import Arm, Table

RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
LAGS = (0, 2, 8, 32)

TABLE = Table(
    name="lr-law",
    question="Which learning rate is best, and which is the largest that trains, at each lag?",
    tasks={"reversal": {}},
    values={
        "learner.steps": 60,
        "learner.schedule": "constant",
        "learner.groups_per_step": 8,
        "buffer.max_staleness": max(LAGS),
    },
    arms=tuple(Arm(f"lag {lag}, lr {rate:g}", {"learner.lr": rate}, lag) for lag in LAGS for rate in RATES),
    measures=("held_out", "last_success"),
)

if __name__ == "__main__":
    main(TABLE)
