"""Time to success 0.9: asynchronous, synchronous, and TRL's GRPOTrainer on the single-turn task. See command.py.

    python scripts/bench/learning/time_to.py --tune      # every learning rate with seeds 100 to 104, then set RATES
    python scripts/bench/learning/time_to.py

Needs two quiet cores, which all three may use, and the `bench` extra for TRL, which may sit in another virtual
environment: TRL_PYTHON names its Python. A batch is 16 groups of 8 in all arms.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import needs

from learning.command import main
from learning.declared import Arm, Table
from learning.launched import launched, with_trl

TRL_PYTHON = os.environ.get("TRL_PYTHON", sys.executable)
REMEDY = "pip install -e '.[bench]', name a Python that has them (TRL_PYTHON), or leave the arm out (--arms)"
BOTH_CORES = {"actors.threads": 2, "learner.threads": 2}
"""A synchronous trainer generates with both, then trains with both."""

TABLE = Table(
    name="time-to",
    question="How long does success 0.9 take: asynchronous, synchronous, TRL?",
    tasks={"reversal": {}, "chain": {}},
    values={"learner.steps": 150, "learner.schedule": "constant", "eval.tasks": 0, "learner.checkpoint_every": 150},
    arms=(
        Arm("asynchronous", make=launched),
        Arm("synchronous", {"buffer.max_staleness": 0, **BOTH_CORES}, make=launched),
        Arm("trl", BOTH_CORES, make=with_trl, only=("reversal",)),
    ),
    grid={f"lr {rate:g}": {"learner.lr": rate} for rate in (5e-4, 1e-3, 2e-3)},
    measures=("seconds_to_0.9", "tokens_to_0.9"),
)

if __name__ == "__main__":
    if "trl" in sys.argv or not {"--arms", "--report", "-h", "--help"} & set(sys.argv):
        needs.packages("trl", "datasets", "accelerate", of="the arm of TRL", remedy=REMEDY, python=TRL_PYTHON)
    main(TABLE)
