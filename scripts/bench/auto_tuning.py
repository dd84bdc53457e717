"""`launch.tuning: auto` on the virtual clock, from bad starts of both bound and slots, against every fixed pair.

    python scripts/bench/auto_tuning.py              # the table: six starts, seeds 0 to 4
    python scripts/bench/auto_tuning.py --seeds 100 101 102 --trace

The buffer is the real one (`asyncrl.plan.playing`); episodes, engines and the learner take modelled times. Measured are
the trained tokens/s of 40 training steps from step 20 on: of the automatic choice, and of each pair of a fixed bound
(0, 1, 2, 4, 8) and a fixed number of slots of each actor (4, 8, 16, 32, 64, 128). All pairs are played with the first
seed, and the six that are best there with the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from asyncrl.buffer.bounds.automatic import Auto
from asyncrl.buffer.bounds.slots import SlotLimits
from asyncrl.buffer.rules import Rules
from asyncrl.plan.playing.outcome import Outcome
from asyncrl.plan.playing.simulate import Joins, Length, Play
from asyncrl.plan.playing.world import Modelled
from asyncrl.plan.setting import Setting
from asyncrl.plan.times import EngineTimes, Episode, LearnerTimes, Times, Turn

SIZE, LIMIT, MOST = 2, 8, 128
AFTER, STEPS = 20, 40
"""Training steps before the first that is measured, and those that are."""
BOUNDS, SLOTS = (0, 1, 2, 4, 8), (4, 8, 16, 32, 64, 128)
BEST = 6
"""Pairs that are played with every seed."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    bound: int
    """The bound and the slots of each actor with which the run begins."""
    slots: int
    actors: int
    training: float
    """Seconds of a training step."""
    sigma: float
    """Of the logarithm of the tools' latency."""
    engine: EngineTimes
    delay: float = 0.05
    """Seconds from the outcome until the actors hold the version."""
    groups_per_step: int = 8


FREE = EngineTimes(0.01, 0.0, 0.0)
"""A request costs the others nothing."""
BUSY = EngineTimes(0.004, 0.0006, 0.0)
"""A request slows the others down: from about 7 on, more of them bring little."""

CASES = (
    Case("one slot, synchronous", 0, 1, 2, 0.4, 0.5, FREE),
    Case("all slots, synchronous", 0, MOST, 2, 0.8, 1.5, FREE),
    Case("one slot, large bound", 8, 1, 2, 0.8, 0.5, FREE),
    Case("all slots, large bound, slow learner", 8, MOST, 2, 2.0, 0.5, FREE),
    Case("two slots, busy engine", 0, 2, 2, 0.6, 0.5, BUSY),
    Case("all slots, large bound, busy engine", 8, MOST, 1, 1.0, 1.0, BUSY, delay=0.3),
)


def episode(rng: Random, sigma: float) -> Episode:
    turns = tuple(Turn(0, rng.randint(5, 40), rng.lognormvariate(-1, sigma) if n < 2 else 0.0) for n in range(3))
    return Episode("bench", turns, 0.0, sum(turn.sampled for turn in turns) + 10, 100, 1.0, "done")


def played(
    case: Case, fixed: tuple[int, int] | None, seed: int, joins: Joins | None = None, length: Length | None = None
) -> tuple[Outcome, Play]:
    """One play under a `fixed` bound and number of slots, or the automatic ones. `joins`: actors that are added."""
    rng = Random(seed)
    groups = [tuple(episode(rng, case.sigma) for _ in range(SIZE)) for _ in range(200)]
    learner = LearnerTimes(case.training, 0.0, 0.0, case.delay / 2, 0.0, 0.0)
    times = Times(groups, case.engine, learner, case.delay / 2, 0.0, 0.0, 0.0)
    bound, slots = fixed or (LIMIT, case.slots)
    setting = Setting(case.actors, slots, case.groups_per_step, LIMIT, 1, "fifo")
    rules = Rules(
        steps=1 << 30, groups_per_step=case.groups_per_step, group_size=SIZE, capacity=10**6, lease_s=1e12,
        slots=MOST, max_staleness=bound,
        auto=Auto(0, LIMIT, case.bound) if fixed is None else None,
        tuning=SlotLimits(1, MOST, case.slots) if fixed is None else None,
    )  # fmt: skip
    length = length or Length(AFTER, STEPS)

    def world(clock: object) -> Modelled:
        return Modelled(clock, times, [], Random(seed), (1, 1))  # type: ignore[arg-type]

    play = Play(rules, setting, world, length, joins=joins)
    return play.run(), play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--trace", action="store_true", help="bound and slots of every step, too")
    parser.add_argument("--only", help="cases whose names contain this text")
    args = parser.parse_args()
    print(
        "| case | begins with | best fixed pair | its staleness | automatic: bounds | slots | staleness | "
        "of the best: mean, least |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for case in CASES:
        if args.only is None or args.only in case.name:
            print(row(case, args.seeds, args.trace), flush=True)


def row(case: Case, seeds: Sequence[int], trace: bool) -> str:
    first = {(s, n): played(case, (s, n), seeds[0])[0] for s in BOUNDS for n in SLOTS}
    kept = sorted(first, key=lambda pair: -first[pair].tokens_per_s)[:BEST]
    fixed = {pair: [first[pair], *(played(case, pair, seed)[0] for seed in seeds[1:])] for pair in kept}
    best = max(fixed, key=lambda pair: fmean(o.tokens_per_s for o in fixed[pair]))
    found = [played(case, None, seed) for seed in seeds]
    shares = [
        o.tokens_per_s / max(outcomes[n].tokens_per_s for outcomes in fixed.values()) for n, (o, _) in enumerate(found)
    ]  # fmt: skip
    bounds = sorted({b for _, play in found for b in play.bounds[AFTER:]})
    slots = sorted({n // case.actors for _, play in found for n in play.slots[AFTER:]})
    if trace:
        for pair, outcomes in ({pair: [outcome] for pair, outcome in first.items()} | fixed).items():
            rate, staleness = (fmean(getattr(o, name) for o in outcomes) for name in ("tokens_per_s", "staleness_mean"))
            print(pair, f"{rate:.1f} {staleness:.2f}")
        for _, play in found:
            print(" ".join(f"{b}/{n // case.actors}" for b, n in zip(play.bounds, play.slots, strict=True)))
    return (
        f"| {case.name} | {case.bound}, {case.slots} | {best[0]}, {best[1]} | "
        f"{fmean(o.staleness_mean for o in fixed[best]):.2f} | {bounds[0]} to {bounds[-1]} | {slots[0]} to {slots[-1]} "
        f"| {fmean(o.staleness_mean for o, _ in found):.2f} | {fmean(shares):.1%}, {min(shares):.1%} |"
    )


if __name__ == "__main__":
    main()
