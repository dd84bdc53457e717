"""`launch.tuning: auto`: how many slots each actor has next. Pure: a function of the batches of the line.

    need    slots that would generate one batch in the time of one training step, if an actor with more of them were
            faster in proportion: slots * (1 - idle) / (1 - waited)
    raise   the learner waits for more than `RAISE` of the time, and for more than slots are idle for want of admission:
            to `need` with `ROOM` to spare, at most `MOST` times as many
    undo    of a raise, where batches did not come faster for it by `GAIN`; of a decrease, where the learner waits now
    lower   the learner hardly waits, `need` with `ROOM` to spare is clearly less, and the bound stays: at most to half
    bar     what was undone is not tried again for `BARRED` batches, the next time for twice as many

Idle slots are those that admission leaves without a ticket, so the bound on staleness is raised for them, and not the
slots (automatic.py). A change needs batches that were fixed and ended under the present slots and bound; the first of
them still shows the former ones. Seconds are compared by their medians: a checkpoint or an evaluation is in some.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from asyncrl.buffer.bounds.automatic import BARRED, CALM, LOOKED_AT, RECENT, SURE, Ended, changed
from asyncrl.buffer.ledger.records import Measures
from asyncrl.config import Config
from asyncrl.config.demonstrations import supervised

RAISE, LOWER = 0.03, 0.01
"""Shares of the time that the learner waits."""
ROOM = 1.25
MOST = 4
"""How many times as many slots one change gives at most."""
GAIN = 0.05
"""Share of a batch's seconds that more slots must save."""
CLEARLY = 0.9
"""Fewer slots are tried only below this share of the present ones."""
FIRST = 16
"""Slots at the start."""
_JUDGED = RECENT + 1
"""Batches after a change by which it is undone, or stays."""


@dataclass(frozen=True, slots=True)
class SlotLimits:
    least: int
    most: int
    start: int

    @classmethod
    def of(cls, c: Config) -> SlotLimits | None:
        """None: the slots are not tuned."""
        if c.launch.tuning == "off" or supervised(c):
            return None
        return cls(1, c.actors.most_slots, min(FIRST, c.actors.most_slots))

    def within(self, slots: int) -> int:
        """The nearest number that the limits allow."""
        return max(self.least, min(slots, self.most))


@dataclass(frozen=True, slots=True)
class _Past:
    """What the batches of the line say, the latest last."""

    own: list[Measures]
    """Of the last `RECENT` batches under the present slots and bound, but the first one."""
    before: int | None
    """The slots before the present ones, if these were new within the last batches and no return to former ones."""
    seconds: list[float]
    """Of the last batches under those."""
    ups: list[int]
    """How many batches ago each attempt with more slots ended in the present number, the latest last."""
    downs: list[int]
    """The same of attempts with fewer."""
    new_bound: bool
    """The last batch has changed the bound, so that fewer slots would not be judged by themselves."""


def slots_after(limits: SlotLimits, line: Sequence[Ended]) -> tuple[int, str]:
    """The slots of each actor once the last batch of `line` has ended, and why they are another number than before; the
    batch has what was measured. Without a change the text is empty."""
    held = _held(limits, line)
    wanted, why = (held[-1], "") if line[-1].measures is None else _wanted(held[-1], _past(line, held))
    value = limits.within(wanted)
    if value == held[-1]:
        return value, ""
    limited = f"the limits are {limits.least} to {limits.most}"
    return value, why if value == wanted else "; ".join(filter(None, (why, limited)))


def _held(limits: SlotLimits, line: Sequence[Ended]) -> list[int]:
    """The slots while each of the last batches was filled."""
    slots = [limits.start if b.tuned is None else b.tuned.slots for b in line[-LOOKED_AT - 1 : -1]]
    return slots if len(line) > LOOKED_AT else [limits.start, *slots]


def _wanted(now: int, past: _Past) -> tuple[int, str]:
    if not past.own:
        return now, ""
    waited, idle = fmean(m.waited for m in past.own), fmean(m.idle for m in past.own)
    waits = waited > (SURE * RAISE if len(past.own) == 1 else RAISE)
    said = _said(len(past.own), waited, idle)
    if waits and past.before is not None:
        judged = (past.before, f"{said}, with fewer slots than before") if past.before > now else _gained(now, past)
        if judged is not None:
            return judged
    need = now * (1 - idle) / max(1 - waited, 1e-9)
    if waits and idle < waited and not _is_barred(past.ups):
        return max(now + 1, min(MOST * now, math.ceil(need * ROOM))), said
    fewer = max(math.ceil(now / 2), math.ceil(need * ROOM))
    calm = waited < LOWER and len(past.own) >= CALM and not past.new_bound
    return (fewer, said) if calm and fewer <= CLEARLY * now and not _is_barred(past.downs) else (now, "")


def _said(batches: int, waited: float, idle: float) -> str:
    over = f" over the last {batches} batches" if batches > 1 else ""
    return f"the learner waits {waited:.0%} of the time and slots are idle for {idle:.0%}{over}"


def _gained(now: int, past: _Past) -> tuple[int, str] | None:
    """Whether a raise is undone, or waits for more batches; None: it has brought what it must."""
    if past.before is None or not past.seconds:
        return None
    gain = 1 - median(m.seconds for m in past.own) / max(median(past.seconds), 1e-9)
    if gain >= GAIN:
        return None
    slower = f"{now} slots bring a batch only {gain:.0%} sooner than {past.before}"
    return (past.before, slower) if len(past.own) >= CALM else (now, "")


def _is_barred(ago: Sequence[int]) -> bool:
    """`ago`: how many batches ago each attempt ended."""
    return bool(ago) and ago[-1] < BARRED * 2 ** (len(ago) - 1)


def _past(line: Sequence[Ended], held: Sequence[int]) -> _Past:
    """`held`: the slots while each of the last batches was filled."""
    batches, now = line[-len(held) :], held[-1]
    begins = [0, *(n for n in range(1, len(held)) if held[n] != held[n - 1])]
    """Where each number of slots begins."""
    own = [b.measures for b in batches[_unchanged(batches) + 1 :] if b.measures is not None][-RECENT:]
    former = batches[begins[-2] + 1 : begins[-1]] if len(begins) > 1 else []
    is_new = len(begins) > 1 and len(held) - begins[-1] <= _JUDGED
    back = [
        (len(held) - end, held[begin] > now)
        for begin, end in pairwise(begins)
        if begin and held[begin - 1] == held[end] == now and end - begin <= _JUDGED
    ]
    return _Past(
        own,
        held[begins[-1] - 1] if is_new and not (back and back[-1][0] == len(held) - begins[-1]) else None,
        [b.measures.seconds for b in former if b.measures is not None][-RECENT:],
        [ago for ago, more in back if more],
        [ago for ago, more in back if not more],
        line[-1].decision is not None and bool(line[-1].decision.why),
    )


def _unchanged(batches: Sequence[Ended]) -> int:
    """The first of the last batches that were filled under the same slots and the same bound."""
    return next((n + 1 for n in range(len(batches) - 2, -1, -1) if changed(batches[n])), 0)
