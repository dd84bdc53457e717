"""On-policy distillation on old samples: the direction of the KL, over the lag. See command.py.

python scripts/bench/learning/distillation_lag.py      # models: distillation.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from learning.command import main
from learning.declared import Arm, Table, teacher_of

LAGS = (0, 1, 4, 16)
FIRST = "reverse_kl"
CHOICES = {
    FIRST: {"learner.teacher.divergence": "reverse_kl"},
    "forward_kl": {"learner.teacher.divergence": "forward_kl"},
}
"""Both over the whole vocabulary."""


def arm(name: str, lag: int) -> Arm:
    """`reverse_kl` is compared with its lag 0, the other with `reverse_kl` of the same lag."""
    other = f"{FIRST}, lag {0 if name == FIRST else lag}"
    return Arm(f"{name}, lag {lag}", CHOICES[name], lag, against=other)


TABLE = Table(
    name="distillation-lag",
    question="What does staleness cost on-policy distillation, by the direction of its KL?",
    tasks={"reversal": teacher_of("reversal")},
    values={
        "learner.schedule": "constant",
        "learner.steps": 24,
        "learner.lr": 1e-3,
        "learner.groups_per_step": 32,
        "learner.group_size": 1,
        "buffer.max_staleness": max(LAGS),
        "eval.every": 8,
        "eval.greedy": False,
        "actors.slots": 32,
    },
    arms=tuple(arm(name, lag) for name in CHOICES for lag in LAGS),
    measures=("held_out", "mean_held_out"),
)

if __name__ == "__main__":
    main(TABLE)
