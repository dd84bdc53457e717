"""Settings for episodes of an hour, on the virtual clock of `asyncrl plan`: what the bound, `drop` or `mask`, the batch
and the cadence make of staleness, of drops and of what is trained.

512 slots play episodes of 20 turns, 100 tokens each, whose tools take an hour in all: log-normal, of sigma 0.3 between
episodes and 0.5 between turns. The tickets, the bound, drops and masks are the buffer's own code. A training step takes
60 s, so generation is the slower side, and the seconds of a step follow from the batch.

    python scripts/bench/long_episodes.py      # three minutes; prints the table of docs/how-to/long-episodes.md
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

from results import finish

from asyncrl.config import Config
from asyncrl.plan.playing.outcome import Outcome
from asyncrl.plan.playing.simulate import Length, Play
from asyncrl.plan.playing.world import Modelled
from asyncrl.plan.setting import Setting, rules_of
from asyncrl.plan.times import EngineTimes, Episode, LearnerTimes, Times, Turn

OUT = Path(__file__).parents[2] / "bench" / "results" / "long_episodes.json"
SIZE, ACTORS, SLOTS = 8, 64, 8
TURNS, TOKENS, EPISODE_S, STEP_S = 20, 100, 3600.0, 60.0
SIGMA_EPISODES, SIGMA_TURNS = 0.3, 0.5
TRIED = (
    (8, 4, "drop", 1), (8, 8, "drop", 1), (8, 16, "drop", 1), (8, 32, "drop", 1),
    (8, 8, "mask", 1), (8, 16, "mask", 1), (8, 32, "drop", 4),
    (32, 1, "drop", 1), (32, 2, "drop", 1), (32, 4, "drop", 1), (32, 8, "drop", 1), (32, 2, "mask", 1),
)  # fmt: skip
"""learner.groups_per_step, buffer.max_staleness, buffer.over_age, weights.every."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="training steps that are measured, of 32 groups")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    lines = [
        "| `groups_per_step` | `max_staleness` | `over_age` | `weights.every` | minutes a step | mean and largest "
        "staleness | groups dropped | slots without a ticket |",
        "| ---: | ---: | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    found: list[dict[str, Any]] = []
    print("\n".join(lines))
    for groups, bound, over_age, every in TRIED:
        played = play(groups, bound, over_age, every, options.steps * 32 // groups, options.seed)
        found.append(
            {
                "groups_per_step": groups, "max_staleness": bound, "over_age": over_age, "every": every,
                "step_s": played.step_s, "staleness": [played.staleness_mean, played.staleness_max],
                "dropped": played.dropped, "with_loss": played.tokens_per_s / played.generated_per_s,
                "slots_idle": played.slots_idle, "stuck": played.stuck,
            }
        )  # fmt: skip
        row = found[-1]
        print(
            f"| {groups} | {bound} | {over_age} | {every} | {row['step_s'] / 60:.1f} | {played.staleness_mean:.1f}, "
            f"{played.staleness_max} | {played.dropped:.0%} | {played.slots_idle:.0%} |"
            + f" {played.stuck}"
            * bool(played.stuck),
            flush=True,
        )
    finish(options.out, {"options": {"steps": options.steps, "seed": options.seed}, "rows": found})


def play(groups: int, bound: int, over_age: str, every: int, steps: int, seed: int) -> Outcome:
    config = Config.model_validate(
        {
            "learner": {"groups_per_step": groups, "group_size": SIZE, "steps": 1 << 30},
            "actors": {"count": ACTORS, "slots": SLOTS},
            "buffer": {"max_staleness": bound, "over_age": over_age, "capacity": 4 * ACTORS * SLOTS * (bound + 1)},
            "weights": {"every": every},
            "eval": {"tasks": 0},
        }
    )
    setting = Setting.of(config)
    rng = Random(seed)
    episodes = [tuple(episode(rng) for _ in range(SIZE)) for _ in range(400)]
    learner = LearnerTimes(STEP_S, 0.0, 0.0, 1.0, 0.0, 0.0)
    times = Times(episodes, EngineTimes(0.02, 0.0, 0.0), learner, 5.0, 1.0, 0.0, 0.0)
    warm_up = bound + 2 * ACTORS * SLOTS // (SIZE * groups)
    made = Play(
        rules_of(config, setting), setting, lambda clock: Modelled(clock, times, [], Random(seed), (1, 1)),
        Length(warm_up, steps),
    )  # fmt: skip
    return made.run()


def episode(rng: Random) -> Episode:
    """Its tools take `EPISODE_S` in the mean."""
    long = rng.lognormvariate(-(SIGMA_EPISODES**2) / 2, SIGMA_EPISODES) * EPISODE_S / TURNS
    seconds = [long * rng.lognormvariate(-(SIGMA_TURNS**2) / 2, SIGMA_TURNS) for _ in range(TURNS)]
    turns = tuple(Turn(50, TOKENS, each) for each in seconds)
    return Episode("hour", turns, 0.0, TURNS * (TOKENS + 50), 8 * TURNS * TOKENS, 1.0, "done")


if __name__ == "__main__":
    main()
