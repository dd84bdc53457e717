"""One line of advice from a run's record alone: which side is slower, and what would help. Pure.

It looks at the last training steps in two halves, and says only what both show. `asyncrl plan` plays what it means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncrl.tracking.state import Record

SETTLE = 4
"""Training steps at the start of a run that say nothing."""
FEWEST, MOST = 8, 40
"""Training steps that are needed, and that are looked at."""
WAITS = 0.25
"""Share of the time from which on a wait is worth a word."""
NONE = 0.05
"""Share below which a side does not wait."""
BUSY = 0.85
"""Share of the slots in use from which on actors do not wait for tickets; some are always between two episodes."""
DROPS = 0.1
"""Share of the groups that are dropped as stale from which on it is worth a word."""
LEAST_GAIN = 0.1


@dataclass(frozen=True, slots=True)
class Seen:
    """Means over some training steps."""

    learner_waits: float
    """Share of the time that the learner waits for a batch."""
    slots_busy: float
    stale: float
    """Share of the groups that ended which were dropped as stale."""

    @property
    def finding(self) -> str:
        """`bound`: both sides wait, each for the other; `stale`; `generation` or `training`, the slower side; empty."""
        idle = 1 - self.slots_busy
        if self.learner_waits >= WAITS and idle >= WAITS:
            return "bound"
        if self.stale >= DROPS:
            return "stale"
        if self.learner_waits >= WAITS and self.slots_busy >= BUSY:
            return "generation"
        return "training" if self.learner_waits <= NONE and idle >= WAITS else ""


def advice(records: Sequence[Record], cores: int | None) -> str:
    """The line; empty where the record supports none, or no group was trained. `cores`: of the host; None: unknown.

    Needs the series that every run reports: waits of the learner, slots in use, groups by state, CPU of each role.
    """
    steps = [r for r in records if "throughput/step_s" in r and "throughput/slots_busy" in r and r["step"] > SETTLE]
    steps = steps[-MOST:]
    if len(steps) < FEWEST or not steps[-1].get("buffer/groups/trained"):
        return ""
    middle = len(steps) // 2
    halves = _seen(steps[:middle]), _seen(steps[middle:])
    if not halves[0].finding or halves[0].finding != halves[1].finding:
        return ""
    seen, last = _seen(steps), steps[-1]
    bound = int(last.get("staleness/bound", 0))
    field = "buffer.staleness_limit" if "staleness/target" in last else "buffer.max_staleness"
    waits, idle = f"the learner waits {seen.learner_waits:.0%} of the time", f"{1 - seen.slots_busy:.0%} of the slots"
    match halves[1].finding:
        case "bound":
            return (
                f"the bound holds both sides back: {waits}, and {idle} have no ticket; raise {field} to "
                f"{bound + 1}, or take fewer slots"
            )
        case "stale":
            return (
                f"{seen.stale:.0%} of the groups are dropped as stale; raise {field} to {bound + 1}, or "
                "take fewer slots"
            )
        case "generation":
            ratio = _times(1 - seen.learner_waits)
            return f"generation is the slower side by {ratio}: {_another_actor(steps, seen, cores)}"
        case _:
            return (
                f"training is the slower side by {_times(seen.slots_busy)}: {idle} have no ticket, so more actors give "
                "nothing, and fewer slots give fresher data"
            )


def _seen(steps: Sequence[Record]) -> Seen:
    first, last = steps[0], steps[-1]
    stale = last.get("buffer/dropped/stale", 0.0) - first.get("buffer/dropped/stale", 0.0)
    trained = last.get("buffer/groups/trained", 0.0) - first.get("buffer/groups/trained", 0.0)
    return Seen(
        fmean(step.get("waits/learner/batch", 0.0) for step in steps),
        fmean(step["throughput/slots_busy"] for step in steps),
        stale / (stale + trained) if stale + trained > 0 else 0.0,
    )


def _times(busy: float) -> str:
    return f"{1 / max(busy, 0.01):.1f}x"


def _another_actor(steps: Sequence[Record], seen: Seen, cores: int | None) -> str:
    """What one more actor gives: as much as the others each, as far as the learner keeps up and cores are free."""
    prefix = "system/cpu/"
    names = {name for name in steps[-1] if name.startswith(prefix)}
    cpu = {name: fmean(step[name] for step in steps if name in step) for name in names}
    actors = [used for name, used in cpu.items() if name.startswith(f"{prefix}actor")]
    if not actors:
        return "another actor helps"
    gain = min(1 / len(actors), 1 / max(1 - seen.learner_waits, 0.01) - 1)
    if cores is not None and sum(actors) > 0:
        gain = min(gain, max(0.0, cores - sum(cpu.values())) / sum(actors))
    if gain < LEAST_GAIN:
        return "no core is free for another actor; it needs one of its own"
    count = {1: "a second", 2: "a third"}.get(len(actors), "another")
    return f"{count} actor gives at most {gain:+.0%}"
