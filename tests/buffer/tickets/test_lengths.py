"""`buffer.turns: auto`: turns are recorded in groups of an environment whose episodes take long."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.audit.checks.lengths import lengths
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.core import Buffer
from asyncrl.trajectory import Ticket, TurnRecord, episode_seconds
from tests.buffer.fakes import FakeSource, learner, open_buffer, put, trajectory
from tests.buffer.tickets.test_turns import issue

BOUNDS = Bounds(2, 1, 1, "drop", 0.5, turns_auto_s=60.0)


class Mixed(FakeSource):
    """Even tasks are long ones."""

    def task(self, index: int) -> dict[str, Any]:
        return super().task(index) | {"env": "long" if index % 2 == 0 else "short"}


@dataclass
class Auto:
    """A buffer that can be opened again, with a clock that the test sets."""

    folder: Path
    mixed: bool = False
    clock: float = 1000.0
    buffer: Buffer = field(init=False)

    def __post_init__(self) -> None:
        self.open()
        learner(self.buffer)

    def open(self) -> None:
        source = Mixed() if self.mixed else FakeSource()
        given: dict[str, Any] = {"turns_auto_s": 60.0, "mixed": self.mixed, "max_staleness": 9, "env_retries": 99}
        self.buffer = open_buffer(self.folder, 0.0, source, wall_clock=lambda: self.clock, **given)

    def again(self) -> None:
        self.buffer.commit(0.0)
        self.buffer.database.close()
        self.open()

    def put(self, ticket: Ticket, seconds: float) -> None:
        env = str(ticket.task.get("env", "fake"))
        assert put(self.buffer, replace(trajectory(ticket), env=env, timings={"total": seconds})) == "stored"

    def play(self, groups: int, seconds: float) -> None:
        for _ in range(2 * groups):
            (ticket,) = issue(self.buffer)
            self.put(ticket, seconds)

    def violations(self, bounds: Bounds = BOUNDS) -> list[str]:
        self.buffer.commit(0.0)
        return list(lengths(read_ledger(self.folder), (replace(bounds, mixed=self.mixed),)))


def test_turns_are_recorded_once_more_than_a_tenth_of_ten_episodes_is_longer(tmp_path: Path) -> None:
    auto = Auto(tmp_path)
    auto.play(4, 59.0)
    one, two = issue(auto.buffer, credits=2)
    auto.put(one, 61.0)
    assert not issue(auto.buffer)[0].durable, "nine are too few"
    auto.put(two, 61.0)
    auto.again()
    first, second = issue(auto.buffer, credits=2)
    assert (first.durable, second.durable) == (False, True), "fixed for a group when its first ticket is lent"
    auto.play(5, 1.0)
    assert not issue(auto.buffer, credits=3)[-1].durable, "two of twenty are no more than a tenth"
    assert auto.violations() == []


def test_environments_of_a_mix_are_decided_by_their_own_episodes(tmp_path: Path) -> None:
    auto = Auto(tmp_path, mixed=True)
    for _ in range(24):
        (ticket,) = issue(auto.buffer)
        auto.put(ticket, 100.0 if ticket.task["env"] == "long" else 10.0)
    auto.again()
    assert {(t.task["env"], t.durable) for t in issue(auto.buffer, credits=4)} == {("long", True), ("short", False)}
    assert auto.violations() == []


def test_attempts_that_last_long_and_come_to_no_end_count(tmp_path: Path) -> None:
    auto = Auto(tmp_path)
    for n in range(20):
        (ticket,) = issue(auto.buffer)
        auto.clock += 100.0 if n % 2 else 89.0  # of which a lease of 30 s may have been silence
        auto.buffer.fail("actor-0", ticket.id, ticket.attempt, "timeout", "given up")
    auto.again()
    assert issue(auto.buffer, credits=6)[-1].durable
    assert [row["seconds"] for row in read_ledger(tmp_path).tables["lengths"]] == [70.0] * 10
    assert auto.violations() == []


def test_the_time_in_which_the_buffer_was_down_does_not_count(tmp_path: Path) -> None:
    """All was killed in the evening, and went on the next morning."""
    auto = Auto(tmp_path)
    auto.play(6, 1.0)
    assert not issue(auto.buffer, credits=12)[-1].durable
    auto.clock += 2.0
    auto.buffer.commit(0.0)
    auto.buffer.database.close()
    auto.clock += 8 * 3600.0
    auto.open()
    learner(auto.buffer)
    auto.buffer.joined("actor-0")
    again = issue(auto.buffer, credits=16)
    assert not again[-1].durable
    auto.clock += 91.0
    auto.buffer.fail("actor-0", again[0].id, again[0].attempt, "timeout", "given up")
    auto.buffer.fail("actor-0", again[1].id, again[1].attempt, "timeout", "given up")
    assert auto.violations() == []
    assert [row["seconds"] for row in read_ledger(tmp_path).tables["lengths"][12:]] == [61.0, 61.0]


def test_an_attempt_that_is_put_again_after_the_disk_lost_it_has_its_length_twice(tmp_path: Path) -> None:
    """Its actor was never told that it was stored."""
    auto = Auto(tmp_path)
    one, two = issue(auto.buffer, credits=2)
    auto.put(one, 5.0)
    auto.put(two, 7.0)
    auto.buffer.commit(0.0)
    auto.buffer.database.close()
    cut(tmp_path)
    auto.open()
    assert auto.buffer.lost_to_disk == 1
    learner(auto.buffer)
    auto.put(two, 7.0)
    assert auto.violations() == []
    auto.buffer.database.write("INSERT INTO lengths SELECT 3, grp, idx, attempt, seconds FROM lengths WHERE serial = 0")
    assert auto.violations() == [f"length 3 is of {(0, 0, 0)}, which has it already"]


def cut(folder: Path) -> None:
    """The disk loses the end of the payloads: the trajectory that was stored last."""
    segment = sorted((folder / "payloads").glob("*.segment"))[-1]
    os.truncate(segment, segment.stat().st_size - 1)


def test_a_resumed_episode_took_as_long_as_all_its_turns() -> None:
    turn = TurnRecord(0.0, 20.0, 30.0, 5, 5)
    made = trajectory(None, (0,))  # type: ignore[arg-type]
    assert episode_seconds(replace(made, timings={"total": 60.0}, turn_records=(turn, turn))) == 100.0
    assert episode_seconds(replace(made, timings={"total": 60.0}, turn_records=(turn,))) == 60.0
    assert episode_seconds(made) == 0.0


def test_what_an_audit_finds(tmp_path: Path) -> None:
    auto = Auto(tmp_path)
    auto.play(6, 100.0)
    auto.play(1, 1.0)
    assert auto.violations() == []
    assert any("turns of group 5 are recorded" in text for text in auto.violations(replace(BOUNDS, turns_auto_s=200.0)))
    assert any("are not recorded" in text for text in auto.violations(replace(BOUNDS, turns_auto_s=None, durable=True)))
    changes = {
        "is of no attempt that took so long": "UPDATE lengths SET attempt = 4 WHERE serial = 3",
        "took is not recorded": "DELETE FROM lengths WHERE serial = 13",
        "which does not follow from buffer.turns": "UPDATE groups SET durable = 1 WHERE number = 2",
        "out of order": "UPDATE groups SET lengths = 0 WHERE number = 6",
        "of the environment 'shop'": "UPDATE groups SET task_env = 'shop' WHERE number = 1",
    }
    for said, change in changes.items():
        auto.buffer.database.write(change)
        found = auto.violations()
        assert any(said in text for text in found), (said, found)
