"""Any interleaving keeps the promises while the bound on staleness jumps: by every batch, to any value.

The choice is replaced by one that follows the learning rate that the learner tells, in the buffer and in the audit; how
the buffer goes from one bound to the next is its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from asyncrl.buffer.bounds import automatic
from asyncrl.buffer.bounds.automatic import Auto, Ended
from asyncrl.buffer.client.messages import Told
from tests.buffer.test_interleavings import Interleavings

LIMIT = 5


def jumping(auto: Auto, line: Sequence[Ended]) -> tuple[int, str]:
    """A fake choice: the learning rate of the last batch is the bound."""
    before = line[-2].decision if len(line) > 1 else None
    now = auto.start if before is None else before.target
    measures = line[-1].measures
    value = auto.within(now if measures is None else round(measures.lr))
    return value, "" if value == now else "it jumps"


class ChangingBounds(Interleavings):
    wanted = 0

    def other_options(self) -> dict[str, Any]:
        least = int("replay" in self.options)
        return {"auto": Auto(least, LIMIT, max(least, self.options["max_staleness"])), "max_staleness": LIMIT}

    def told(self) -> Told:
        return Told(0.5, 1.0, float(self.wanted))

    @rule(bound=st.integers(0, LIMIT + 1))
    def wish(self, bound: int) -> None:
        self.wanted = bound


EVERY = list(HealthCheck)


@pytest.fixture
def _jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "target_after", jumping)
    monkeypatch.setattr(importlib.import_module("asyncrl.audit.checks.bounds"), "target_after", jumping)


@pytest.mark.usefixtures("_jumps")
def test_a_changing_bound_keeps_the_promises() -> None:
    few = settings(max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=EVERY)
    run_state_machine_as_test(ChangingBounds, settings=few)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_jumps")
def test_many_interleavings_of_a_changing_bound() -> None:
    thorough = settings(max_examples=500, stateful_step_count=60, deadline=None, suppress_health_check=EVERY)
    run_state_machine_as_test(ChangingBounds, settings=thorough)
