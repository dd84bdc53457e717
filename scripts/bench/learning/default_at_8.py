"""The default objective on samples of staleness 8, against the synchronous trainer. See command.py.

python scripts/bench/learning/default_at_8.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from learning.command import main
from learning.declared import Arm, Table

TABLE = Table(
    name="default-at-8",
    question="What does a staleness of exactly 8 cost the default objective?",
    tasks={"reversal": {}, "countdown": {}, "frozen_lake": {}},
    values={
        "learner.steps": 40,
        "learner.groups_per_step": 8,
        "buffer.max_staleness": 8,
    },
    arms=(Arm("synchronous", {"buffer.max_staleness": 0}), Arm("staleness 8", lag=8)),
    measures=("held_out",),
)

if __name__ == "__main__":
    main(TABLE)
