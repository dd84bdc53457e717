"""The histories that the audit is tried on: each with what another part of the buffer does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.audit.histories.batches import awaited, forked, interrupted, replayed, shown, supervised, taught, used_twice
from tests.audit.histories.bounds import automatic, tuned
from tests.audit.histories.evaluations import evaluated, stopped
from tests.audit.histories.turns import branched, measured, recorded
from tests.audit.simulated import Simulated

KINDS: dict[str, Callable[[Path], Simulated]] = {
    "interrupted": interrupted,
    "forked": forked,
    "wait": awaited,
    "max_uses 2": used_twice,
    "replay": replayed,
    "evaluated": evaluated,
    "demonstrations": shown,
    "sft": supervised,
    "stopped": stopped,
    "recorded": recorded,
    "branched": branched,
    "measured": measured,
    "auto": automatic,
    "tuned": tuned,
    "taught": taught,
}
