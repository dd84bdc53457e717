"""`buffer.max_staleness: auto` on the virtual clock, from bad starts, against every fixed bound.

    python scripts/bench/auto_staleness.py              # the table: six starts, seeds 0 to 4
    python scripts/bench/auto_staleness.py --seeds 100 101 102 103 104 --trace

The buffer is the real one (`asyncrl.plan.playing`); episodes, engines and the learner take modelled times. Measured are
the trained tokens/s of 40 training steps from step 20 on, of the automatic bound and of each fixed bound from 0 to 8.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from asyncrl.buffer.bounds.automatic import Auto
from asyncrl.buffer.rules import Rules
from asyncrl.plan.playing.outcome import Outcome
from asyncrl.plan.playing.simulate import Length, Play
from asyncrl.plan.playing.world import Modelled
from asyncrl.plan.setting import Setting
from asyncrl.plan.times import EngineTimes, Episode, LearnerTimes, Times, Turn

SIZE, LIMIT, TOKEN_S = 2, 8, 0.01
AFTER, STEPS = 20, 40
"""Training steps before the first that is measured, and those that are."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    start: int
    """The bound that the run begins with."""
    actors: int
    slots: int
    groups_per_step: int
    training: float
    """Seconds of a training step."""
    sigma: float
    """Of the logarithm of the tools' latency."""
    delay: float = 0.05
    """Seconds from the outcome until the actors hold the version."""


CASES = (
    Case("many slots", 0, 4, 16, 8, 0.2, 0.5),
    Case("long tail", 0, 2, 16, 8, 0.8, 1.5),
    Case("slow learner", 0, 2, 16, 8, 2.0, 0.5),
    Case("slow learner, large bound", 8, 2, 16, 8, 2.0, 0.5),
    Case("few slots, large bound", 8, 1, 8, 8, 0.4, 1.0),
    Case("balanced", 8, 2, 16, 8, 1.0, 1.0, delay=0.3),
)


def episode(rng: Random, sigma: float) -> Episode:
    turns = tuple(Turn(0, rng.randint(5, 40), rng.lognormvariate(-1, sigma) if n < 2 else 0.0) for n in range(3))
    return Episode("bench", turns, 0.0, sum(turn.sampled for turn in turns) + 10, 100, 1.0, "done")


def played(case: Case, bound: int | None, seed: int) -> tuple[Outcome, Play]:
    """One play under a fixed `bound`, or the automatic one."""
    rng = Random(seed)
    groups = [tuple(episode(rng, case.sigma) for _ in range(SIZE)) for _ in range(200)]
    learner = LearnerTimes(case.training, 0.0, 0.0, case.delay / 2, 0.0, 0.0)
    times = Times(groups, EngineTimes(TOKEN_S, 0.0, 0.0), learner, case.delay / 2, 0.0, 0.0, 0.0)
    setting = Setting(case.actors, case.slots, case.groups_per_step, LIMIT, 1, "fifo")
    rules = Rules(
        steps=1 << 30, groups_per_step=case.groups_per_step, group_size=SIZE, capacity=10**6, lease_s=1e12,
        slots=case.slots, max_staleness=LIMIT if bound is None else bound,
        auto=Auto(0, LIMIT, case.start) if bound is None else None,
    )  # fmt: skip
    play = Play(rules, setting, lambda clock: Modelled(clock, times, [], Random(seed), (1, 1)), Length(AFTER, STEPS))
    return play.run(), play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--trace", action="store_true", help="the bound of every step, too")
    args = parser.parse_args()
    print("| case | start | best fixed bound | its staleness | automatic: bounds | staleness | of the best, least |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: |")
    for case in CASES:
        print(row(case, args.seeds, args.trace))


def row(case: Case, seeds: Sequence[int], trace: bool) -> str:
    fixed = {s: [played(case, s, seed)[0] for seed in seeds] for s in range(LIMIT + 1)}
    best = max(fixed, key=lambda s: fmean(o.tokens_per_s for o in fixed[s]))
    found = [played(case, None, seed) for seed in seeds]
    shares = [
        o.tokens_per_s / max(fixed[s][n].tokens_per_s for s in fixed) for n, (o, _) in enumerate(found)
    ]  # fmt: skip
    bounds = sorted({b for _, play in found for b in play.bounds[AFTER:]})
    if trace:
        for s, outcomes in fixed.items():
            print(
                s, f"{fmean(o.tokens_per_s for o in outcomes):.1f}", f"{fmean(o.staleness_mean for o in outcomes):.2f}"
            )
        for _, play in found:
            print(" ".join(map(str, play.bounds)))
    return (
        f"| {case.name} | {case.start} | {best} | {fmean(o.staleness_mean for o in fixed[best]):.2f} | "
        f"{bounds[0]} to {bounds[-1]} | {fmean(o.staleness_mean for o, _ in found):.2f} | "
        f"{fmean(shares):.1%}, {min(shares):.1%} |"
    )


if __name__ == "__main__":
    main()
