"""Replay: success for each generated token. See command.py.

python scripts/bench/learning/replay.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from learning.command import main
from learning.declared import Arm, Table

AGAIN = {"buffer.replay": 1.0, "buffer.max_uses": 4}
"""Each batch has as many used groups as new ones; a group is used four times at most."""

TABLE = Table(
    name="replay",
    question="How much is learned from the same generated tokens, with and without replay?",
    tasks={"reversal": {}, "countdown": {}},
    values={
        "learner.steps": 60,
        "learner.groups_per_step": 8,
        "learner.lr": 1e-3,
        "buffer.max_staleness": 8,
    },
    arms=(
        Arm("fresh"),
        Arm(
            "uniform",
            AGAIN | {"buffer.replay_priority": "uniform", "buffer.replay_half_life": None, "buffer.replay_beta": 0.0},
        ),
        Arm("priorities", AGAIN | {"buffer.replay_priority": "spread", "buffer.replay_half_life": None}),
        Arm("freshness", AGAIN | {"buffer.replay_priority": "spread", "buffer.replay_half_life": 2.0}),
    ),
    grid={"lr 1e-3": {"learner.lr": 1e-3}, "lr 2e-3": {"learner.lr": 2e-3}},
    measures=("held_out", "mean_success"),
)

if __name__ == "__main__":
    main(TABLE)
