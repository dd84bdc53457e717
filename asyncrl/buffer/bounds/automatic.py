"""`buffer.max_staleness: auto`: which bound on staleness comes next. Pure: a function of the batches of the line.

    cost    what the bound costs: the smaller of the share of the time that the learner waited for a batch, and of the
            share of generation that is lost, in slots that admission leaves without a ticket and in stale groups
    raise   the cost is above `RAISE`: back to the value from which the bound was lowered, else twice as large
    lower   the cost is below `LOWER`: half way towards the largest smaller value at which it had to be raised
            Both go by the mean of the last `RECENT` batches under the present value, as does the sample size.
    bar     that value itself is not tried for `BARRED` batches, the next time for twice as many
    limits  weights.every - 1 and buffer.staleness_limit; buffer.staleness_lr over the learning rate. Below an effective
            sample size of `NO_RAISE` it is not raised, below `TOO_SMALL` it is lowered

A change needs batches that were fixed and ended under the present value; the first of them still shows the former one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from asyncrl.buffer.ledger.records import Decision, Measures, Tuned
from asyncrl.config import Config
from asyncrl.config.demonstrations import supervised

RAISE, LOWER = 0.02, 0.005
SURE = 2
"""How many times `RAISE` a batch must cost if it alone is to raise the bound."""
CALM = 4
"""How many cheap batches must come before the bound is lowered."""
RECENT = 8
"""Batches over which cost and effective sample size are averaged."""
BARRED = 48
NO_RAISE, TOO_SMALL = 0.9, 0.7
"""Limits of the effective sample size over rows (docs/explanation/staleness.md)."""
LOOKED_AT = 512
"""Batches at the end of the line that count."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The limits of the automatic bound."""

    least: int
    limit: int
    start: int
    staleness_lr: float = 0.0
    """Above 0: the most that learning rate times bound may be."""

    @classmethod
    def of(cls, c: Config) -> Auto | None:
        """None: the bound is fixed."""
        if c.buffer.max_staleness != "auto" or supervised(c):
            return None
        limit = c.buffer.staleness_limit
        least = max(c.weights.every - 1, int(c.buffer.replay > 0))
        return cls(least, limit, min(limit, max(least, 2 * c.weights.every - 1)), c.buffer.staleness_lr)

    def within(self, bound: int, lr: float = 0.0) -> int:
        """The nearest value that the limits allow.

        >>> auto = Auto(least=1, limit=8, start=1, staleness_lr=1e-5)
        >>> auto.within(0), auto.within(9), auto.within(4, lr=4e-6), auto.within(4, lr=1.0)
        (1, 8, 2, 1)
        """
        most = self.limit
        if self.staleness_lr and lr > 0:
            most = min(most, math.floor(min(self.staleness_lr / lr, self.limit)))
        return max(self.least, min(bound, most))


@dataclass(frozen=True, slots=True)
class _Past:
    """What the batches of the line say, the latest last."""

    costs: list[float]
    """Costs of the last `RECENT` batches that were trained under the present value and the present slots
    (slots.py), but the first one."""
    ess: list[float]
    lowered_from: int | None
    """The value before this one, if it was larger."""
    floor: int | None
    """The largest value below the present one at which the bound had to be raised; None: there is none."""
    barred: bool
    """It is not to be tried yet."""


class Ended(Protocol):
    """What counts of a batch, in the buffer as in the audit."""

    @property
    def bound(self) -> int: ...

    @property
    def measures(self) -> Measures | None: ...

    @property
    def decision(self) -> Decision | None: ...

    @property
    def tuned(self) -> Tuned | None: ...


def changed(batch: Ended) -> bool:
    """Whether its end changed the bound or the slots."""
    return any(made is not None and made.why for made in (batch.decision, batch.tuned))


def cost(m: Measures) -> float:
    """The share of the throughput that the bound costs.

    >>> cost(Measures(waited=0.5, idle=0.2, stale=0.25, ess=1.0, lr=0.0))
    0.4
    """
    return min(m.waited, 1 - (1 - m.idle) * (1 - m.stale))


def target_after(auto: Auto, line: Sequence[Ended]) -> tuple[int, str]:
    """The bound under which groups are admitted once the last batch of `line` has ended, and why it is another one than
    before; the batch has what was measured. Without a change the text is empty."""
    held, measures = _held(auto, line), line[-1].measures
    wanted, why = (held[-1], "") if measures is None else _wanted(auto, held[-1], _past(line, held))
    value = auto.within(wanted, 0.0 if measures is None else measures.lr)
    if value == held[-1]:
        return value, ""
    return value, why if value == wanted else "; ".join(filter(None, (why, _limits(auto))))


def _held(auto: Auto, line: Sequence[Ended]) -> list[int]:
    """The target while each of the last batches was filled."""
    targets = [auto.start if b.decision is None else b.decision.target for b in line[-LOOKED_AT - 1 : -1]]
    return targets if len(line) > LOOKED_AT else [auto.start, *targets]


def _wanted(auto: Auto, now: int, past: _Past) -> tuple[int, str]:
    if not past.costs:
        return now, ""
    mean, ess = fmean(past.costs), fmean(past.ess)
    over = f" over the last {len(past.costs)} batches" if len(past.costs) > 1 else ""
    if ess < TOO_SMALL:
        return now - 1, f"the effective sample size is {ess:.2f}{over}, below {TOO_SMALL}"
    if mean > (SURE * RAISE if len(past.costs) == 1 else RAISE) and ess >= NO_RAISE:
        value = max(now + 1, 2 * now) if past.lowered_from is None else past.lowered_from
        return value, f"learner and slots wait for each other: the bound costs {mean:.0%}{over}"
    if mean < LOWER and len(past.costs) >= CALM:
        floor = auto.least - 1 if past.floor is None else past.floor
        value = max((now + floor) // 2, floor + 1)
        if value == now and not past.barred:
            value = floor
        return value, f"fresher data, since the bound costs {mean:.1%}{over}"
    return now, ""


def _past(line: Sequence[Ended], held: Sequence[int]) -> _Past:
    """`held`: the target of each of the last batches."""
    now, batches = held[-1], line[-len(held) :]
    begin = next((n + 1 for n in range(len(held) - 1, -1, -1) if held[n] != now), 0)
    same = next((n + 1 for n in range(len(held) - 2, -1, -1) if changed(batches[n])), begin)
    own = [batch.measures for batch in batches[max(begin, same) + 1 :] if batch.measures is not None][-RECENT:]
    before = held[begin - 1] if begin else now
    # A value is left behind upwards each time that it costs too much.
    raised = [n for n in range(1, len(held)) if held[n - 1] < held[n] and held[n - 1] < now]
    floor = max((held[n - 1] for n in raised), default=None)
    at = [n for n in raised if held[n - 1] == floor]
    barred = bool(at) and len(held) - at[-1] < BARRED * 2 ** (len(at) - 1)
    lowered_from = before if before > now else None
    return _Past([cost(m) for m in own], [m.ess for m in own], lowered_from, floor, barred)


def _limits(auto: Auto) -> str:
    lr = f", learning rate times bound at most {auto.staleness_lr:g}" if auto.staleness_lr else ""
    return f"the limits are {auto.least} to {auto.limit}{lr}"


def decision(auto: Auto, line: Sequence[Ended], issued: int, oldest: int | None, in_time: bool) -> Decision:
    """What holds from the end of the last batch of `line` on.

    A smaller bound holds for new groups at once, and for batches as soon as the groups admitted before are gone.

    Args:
        issued: groups that were ever issued.
        oldest: number of the oldest group that is in flight or waiting; None: there is none.
        in_time: whether all of these can still be trained within the smaller bound (`over_age: wait`).
    """
    target, why = target_after(auto, line)
    bound, earlier = line[-1].bound, line[-2].decision if len(line) > 1 else None
    since = 0 if earlier is None else earlier.since
    if is_lowered(auto, line, target):
        since = issued
    gone = oldest is None or oldest >= since
    holds = target < bound and not (gone and in_time)
    return Decision(target, min(bound, auto.limit) if holds else target, since, why)


def is_lowered(auto: Auto, line: Sequence[Ended], target: int) -> bool:
    """Whether groups may be there that were admitted under a larger bound than `target`, which the last batch of `line`
    has decided: under the target before, or under a bound that the configuration had fixed."""
    earlier = line[-2] if len(line) > 1 else None
    fixed = earlier is not None and earlier.decision is None and target < earlier.bound
    return fixed or target < _held(auto, line)[-1]


def stale_share(stale: int, first_uses: int) -> float:
    """Share of the groups dropped as stale while a batch was filled, among these and those that the batch uses first.

    >>> stale_share(1, 3), stale_share(0, 0)
    (0.25, 0.0)
    """
    return stale / (stale + first_uses) if stale else 0.0


def in_force(auto: Auto, last: Ended | None) -> Decision:
    """What `last`, the last batch that has ended, decided, within the limits of this configuration; None: none has.

    After a batch whose bound was fixed by the configuration, groups are admitted under the start; a larger bound goes
    on for batches, since groups may be there that were admitted under it.
    """
    found = None if last is None else last.decision
    if found is None:
        before = auto.start if last is None else max(auto.start, last.bound)
        return Decision(auto.within(auto.start), auto.within(before), 0, "")
    return replace(found, target=auto.within(found.target), bound=auto.within(found.bound))
