"""Idle slots are those of the actors that admission refuses, whoever asked last."""

from __future__ import annotations

from asyncrl.buffer.bounds.idle_slots import FORGOTTEN_S, IdleSlots


def test_an_actor_that_is_met_does_not_fill_the_slots_of_one_that_is_refused() -> None:
    slots = IdleSlots(0.0)
    slots.asked(0.0, "a", slots=4, leased=1, refused=True)
    slots.asked(0.0, "b", slots=4, leased=4, refused=False)
    assert slots.share(10.0, {"a": 1, "b": 4}) == 3 / 8


def test_an_actor_that_is_refused_makes_no_slot_of_another_idle() -> None:
    """The other one has free slots because it waits for something else."""
    slots = IdleSlots(0.0)
    slots.asked(0.0, "b", slots=4, leased=0, refused=False)
    slots.asked(0.0, "a", slots=4, leased=4, refused=True)
    assert slots.share(10.0, {"a": 4}) == 0.0


def test_an_actor_that_has_left_is_forgotten() -> None:
    slots = IdleSlots(0.0)
    slots.asked(0.0, "a", slots=4, leased=0, refused=True)
    assert slots.share(FORGOTTEN_S + 1, {}) == 1.0
    assert slots.share(FORGOTTEN_S + 2, {}) == 0.0
