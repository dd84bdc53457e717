"""Any interleaving keeps the promises while the slots jump, alone and together with the bound on staleness.

Both choices are replaced by ones that follow what the learner tells, in the buffer and in the audit; how the buffer
goes from one number to the next, and whom it gives tickets, is its own.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from asyncrl.buffer.bounds import automatic
from asyncrl.buffer.bounds.automatic import Ended
from asyncrl.buffer.bounds.slots import SlotLimits
from asyncrl.buffer.client.messages import Told
from tests.buffer.bounds.test_changing import ChangingBounds, jumping

MOST = 9


def slots_jump(limits: SlotLimits, line: Sequence[Ended]) -> tuple[int, str]:
    """A fake choice: the seconds of the last batch are the slots."""
    before = line[-2].tuned if len(line) > 1 else None
    now = limits.start if before is None else before.slots
    value = now if line[-1].measures is None else limits.within(round(line[-1].measures.seconds))
    return value, "" if value == now else "they jump"


class ChangingBoth(ChangingBounds):
    slots = 4

    def other_options(self) -> dict[str, Any]:
        return super().other_options() | {"tuning": SlotLimits(1, MOST, 4)}

    def told(self) -> Told:
        return Told(0.5, 1.0, float(self.wanted), float(self.slots))

    @rule(slots=st.integers(0, MOST + 3))
    def wish_slots(self, slots: int) -> None:
        self.slots = slots

    @rule(actor=st.sampled_from(["a", "b"]))
    def ask_for_much(self, actor: str) -> None:
        before = Counter(lease.actor for lease in self.buffer.leases)[actor]
        self.issue(actor, 2 * MOST)
        number = self.buffer.tickets.bound.slots.number
        assert number is not None
        assert Counter(lease.actor for lease in self.buffer.leases)[actor] <= max(before, number)

    @invariant()
    def no_actor_holds_more_than_any_number_of_slots(self) -> None:
        if hasattr(self, "buffer"):
            assert max(Counter(lease.actor for lease in self.buffer.leases).values(), default=0) <= MOST


EVERY = list(HealthCheck)


@pytest.fixture
def _jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "target_after", jumping)
    monkeypatch.setattr(importlib.import_module("asyncrl.audit.checks.bounds"), "target_after", jumping)
    for module in ("asyncrl.buffer.tickets.slots_in_force", "asyncrl.audit.checks.slots"):
        monkeypatch.setattr(importlib.import_module(module), "slots_after", slots_jump)


@pytest.mark.usefixtures("_jumps")
def test_changing_slots_and_bounds_keep_the_promises() -> None:
    few = settings(max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=EVERY)
    run_state_machine_as_test(ChangingBoth, settings=few)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_jumps")
def test_many_interleavings_of_changing_slots_and_bounds() -> None:
    thorough = settings(max_examples=500, stateful_step_count=60, deadline=None, suppress_health_check=EVERY)
    run_state_machine_as_test(ChangingBoth, settings=thorough)
