"""The formulas, and that they keep what they promise: a small simulated run under every policy."""

from __future__ import annotations

import heapq
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.staleness import due
from tests.buffer.fakes import learner, open_buffer, put, trajectory


class Simulation:
    """Actors with slots, a learner, time in seconds. `duration` gives an episode's length; None: it never ends."""

    def __init__(
        self,
        folder: Path,
        duration: Any,
        train_s: float = 4.0,
        slots: int = 6,
        every: int = 1,
        guard_every: int = 0,
        **options: Any,
    ):
        self.options = {
            "steps": 12,
            "groups_per_step": 2,
            "group_size": 2,
            "max_staleness": 2,
            "capacity": 64,
        } | options
        self.buffer = open_buffer(folder, **self.options)
        self.duration = duration
        self.train_s = train_s
        self.slots = slots
        self.every = every
        self.guard_every = guard_every
        self.events: list[tuple[float, int, Any]] = []
        self.serial = 0

    def after(self, when: float, what: Any) -> None:
        self.serial += 1
        heapq.heappush(self.events, (when, self.serial, what))

    def run(self, until: float = 2000.0) -> dict[str, int]:
        buffer = self.buffer
        incarnation = learner(buffer)
        self.held = 0
        busy = 0
        b = 0
        training = False
        now = 0.0
        poll = 1.0
        while now < until and buffer.ledger.history.version < self.options["steps"]:
            buffer.tick(now)
            tickets, _ = buffer.issue(now, "a", (0, self.held), self.slots - busy)
            for ticket in tickets:
                busy += 1
                length = self.duration(ticket)
                if length is None:
                    busy -= 1  # the actor dies with it; another takes its place
                else:
                    self.after(now + length, (ticket, self.held))
            if not training:
                answer = buffer.batch(now, incarnation, b)
                assert not answer.failed, answer.why
                if answer.state == "ended":
                    break
                if answer.state == "ready":
                    training = True
                    self.after(now + self.train_s, "trained")
            if not self.events or self.events[0][0] > now + poll:
                now += poll
                continue
            now, _, event = heapq.heappop(self.events)
            if event == "trained":
                skipped = self.guard_every and b % self.guard_every == self.guard_every - 1
                version = buffer.finished(incarnation, b, "guard" if skipped else "applied")
                b, training = b + 1, False
                if version % self.every == 0 and not skipped:
                    self.held = version
                    buffer.published(incarnation, 0, version, "d")
            else:
                ticket, begun = event
                busy -= 1
                put(buffer, trajectory(ticket, tuple(range(begun, self.held + 1)), float(ticket.id.index)))
        return buffer.ledger.account.equation(0) | {"version": buffer.ledger.history.version}


def test_equal_durations_in_issue_order_drop_nothing(tmp_path: Path) -> None:
    for place, (staleness, every, length) in enumerate(
        [(0, 1, 3.0), (1, 1, 3.0), (2, 1, 9.0), (2, 3, 5.0), (4, 2, 20.0)]
    ):
        run = Simulation(tmp_path / str(place), lambda _, n=length: n, max_staleness=staleness, every=every)
        counts = run.run()
        assert counts["version"] == 12
        assert not [name for name in counts if name.startswith("dropped")]


@settings(max_examples=15, deadline=None)
@example(seed=46409, over_age="wait", staleness=1, max_uses=2, deaths=0.05, guard_every=0)
@given(
    seed=st.integers(0, 10**6),
    over_age=st.sampled_from(["drop", "wait", "mask"]),
    staleness=st.integers(0, 3),
    max_uses=st.integers(1, 2),
    deaths=st.sampled_from([0.0, 0.05]),
    guard_every=st.sampled_from([0, 2]),
)
def test_every_policy_makes_progress(
    tmp_path_factory: Any, seed: int, over_age: str, staleness: int, max_uses: int, deaths: float, guard_every: int
) -> None:
    """Long-tailed episodes, dying actors, batches refused by the learner's guard: the run ends, and nothing is dropped
    for a reason that is not the policy's."""
    rng = random.Random(seed)

    def duration(ticket: Any) -> float | None:
        return None if rng.random() < deaths else rng.paretovariate(1.1)

    folder = tmp_path_factory.mktemp("simulation")
    options: dict[str, Any] = {"over_age": over_age, "max_staleness": staleness, "max_uses": max_uses, "wait_s": 20.0}
    counts = Simulation(folder, duration, guard_every=guard_every, **options).run(until=5000.0)
    assert counts["version"] == 12
    dropped = {name.removeprefix("dropped: ") for name in counts if name.startswith("dropped")}
    policy = {"wait_deadline"} if over_age == "wait" else {"stale"}
    if max_uses > 1:  # used groups take places too, so that more unused ones may be due at once than fit
        policy.add("stale")
    assert dropped <= policy | ({"guard"} if guard_every else set())
    assert not guard_every or "guard" in dropped or max_uses > 1


def test_wait_drops_nothing_while_the_learner_can_wait_long_enough(tmp_path: Path) -> None:
    rng = random.Random(1)
    counts = Simulation(tmp_path, lambda _: rng.paretovariate(1.1), over_age="wait", wait_s=1e9).run(until=1e4)
    assert counts["version"] == 12
    assert not [name for name in counts if name.startswith("dropped")]


def test_drop_starves_long_episodes_and_the_bias_shows_it(tmp_path: Path) -> None:
    run = Simulation(tmp_path, lambda t: 60.0 if t.id.group % 4 == 0 else 1.0, slots=12, train_s=2.0)
    counts = run.run()
    assert counts["version"] == 12
    assert counts["dropped: stale"] > 0
    assert run.buffer.ledger.bias.fates["dropped"].count > 0


def test_under_wait_a_hung_group_blocks_nobody_for_ever(tmp_path: Path) -> None:
    run = Simulation(tmp_path, lambda t: None if t.id.group == 1 else 2.0, over_age="wait", wait_s=30.0)
    counts = run.run()
    assert counts["version"] == 12
    assert counts["dropped: wait_deadline"] == 1


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 4), st.integers(1, 6))
def test_due_takes_just_enough(lasts: list[int], max_staleness: int, groups_per_step: int) -> None:
    """What is due, with `groups_per_step` more per step, leaves nobody behind that could have been taken."""
    known = [(last, Group(i, 0, 0, "", 1, "waiting")) for i, last in enumerate(lasts)]
    chosen = due(known, 0, max_staleness, groups_per_step)
    assert len(chosen) <= groups_per_step
    rest = [last for last, group in known if group not in chosen]
    for k in range(max_staleness + 1):
        closing = sum(last <= k for last, _ in known)
        if closing <= (k + 1) * groups_per_step:
            assert sum(last <= k for last in rest) <= k * groups_per_step
    if len(chosen) < groups_per_step and chosen:
        fewer = [last for last, group in known if group not in chosen[:-1]]
        assert any(sum(last <= k for last in fewer) > k * groups_per_step for k in range(max_staleness + 1))


@pytest.mark.parametrize("over_age", ["drop", "mask"])
def test_an_incomplete_group_over_age_is_dropped_at_once(tmp_path: Path, over_age: str) -> None:
    buffer = open_buffer(tmp_path, over_age=over_age, max_staleness=0, groups_per_step=1, group_size=2, steps=9)
    incarnation = learner(buffer)
    tickets = buffer.issue(0, "a", (0, 0), 2)[0]
    put(buffer, trajectory(tickets[0]))
    assert buffer.ledger.history.published == 0
    # The learner gets ahead by redoing a recorded step: here, by hand.
    buffer.ledger.history.move(0, 1, None)
    buffer.tickets.sweep()
    assert bool(buffer.leases.of_group(0)) == (over_age == "mask")
    assert incarnation == 1
