"""What holds after every step of any interleaving: what actors and learner were told, compared with the ledger."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant

from asyncrl.buffer.core import Buffer
from asyncrl.trajectory import Trajectory


class Promises(RuleBasedStateMachine):
    """A machine that keeps these fields has these invariants."""

    folder: Path
    buffer: Buffer
    options: dict[str, Any]
    stored: dict[tuple[int, int], Trajectory]
    """What actors were told is stored, by (group, index)."""
    over_full: bool
    """A fork may have released more groups than there is room for."""

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.folder}/ledger.sqlite?mode=ro", uri=True) as db:
            rows = db.execute(query).fetchall()
        db.close()
        return rows

    @invariant()
    def the_equation(self) -> None:
        for branch in self.buffer.ledger.history.branches:
            counts = self.buffer.ledger.account.equation(branch)
            assert counts["issued"] == sum(n for name, n in counts.items() if name != "issued")
            rows = self.sql(f"SELECT state, reason FROM groups WHERE branch = {branch}")
            names = Counter(state if reason is None else f"{state}: {reason}" for state, reason in rows)
            assert {"issued": len(rows), **names} == counts

    @invariant()
    def states_fit_what_is_stored(self) -> None:
        stored = Counter(group for group, _ in self.stored)
        for number, state, reason, size, uses in self.sql("SELECT number, state, reason, size, uses FROM groups"):
            assert (reason is not None) == (state == "dropped")
            if state in ("waiting", "assigned", "trained"):
                assert stored[number] == size
            elif state == "in_flight":
                assert stored[number] < size
            if state in ("trained", "dropped"):
                assert (uses > 0) == (state == "trained")

    @invariant()
    def recorded_turns_add_up(self) -> None:
        """recorded = kept + continued + ..., in memory as in the ledger."""
        rows = self.sql("SELECT coalesce(ended, 'kept'), count(*), sum(sampled) FROM turns GROUP BY 1")
        turns = self.buffer.tickets.carried.turns
        assert {how: n for how, n, _ in rows} == {how: n for how, n in turns.counts.items() if n}
        assert turns.recorded == sum(n for _, n, _ in rows)
        assert turns.wasted == sum(n for how, _, n in rows if how not in ("kept", "continued", "longer"))

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        digests = {(g, i): d for g, i, d in self.sql("SELECT grp, idx, digest FROM trajectories")}
        assert digests == {key: t.digest() for key, t in self.stored.items()}

    @invariant()
    def staleness_is_bounded_at_every_use(self) -> None:
        auto = self.options.get("auto")
        counts: dict[int, list[np.ndarray[Any, Any]]] = {}
        for group, versions in self.sql("SELECT grp, versions FROM trajectories"):
            counts.setdefault(group, []).append(np.frombuffer(versions, np.int64).reshape(-1, 2))
        uses = self.sql("SELECT b.version, b.bound, u.grp FROM uses u JOIN batches b USING (serial)")
        for version, bound, group in uses:
            if auto is None:
                assert bound == self.options["max_staleness"]
            assert bound <= (self.options["max_staleness"] if auto is None else auto.limit)
            if group not in counts:  # of a batch that was released; then the disk lost it
                continue
            pairs = np.concatenate(counts[group])
            assert pairs[:, 0].max() <= version
            fresh = pairs[:, 0] >= version - bound
            if self.options["over_age"] == "mask":
                assert pairs[fresh, 1].sum() >= 0.5 * pairs[:, 1].sum()
            else:
                assert fresh.all()

    @invariant()
    def no_group_is_used_too_often(self) -> None:
        line = self.sql(
            "SELECT u.serial, u.grp, b.outcome FROM uses u JOIN batches b USING (serial) WHERE b.released = 0"
        )
        assert len({(serial, group) for serial, group, _ in line}) == len(line)
        uses = Counter(group for _, group, _ in line)
        assert max(uses.values(), default=0) <= self.options["max_uses"]
        applied = Counter(group for _, group, outcome in line if outcome == "applied")
        assert dict(self.sql("SELECT number, uses FROM groups WHERE uses > 0")) == dict(applied)

    @invariant()
    def replayed_groups_come_on_top_of_a_batch_of_new_ones(self) -> None:
        if "replay" not in self.options:
            assert self.sql("SELECT * FROM replays") == []
            return
        used: Counter[int] = Counter()
        rows = self.sql(
            "SELECT b.serial, u.grp, r.weight, b.outcome FROM uses u JOIN batches b USING (serial) LEFT JOIN replays r "
            "ON r.serial = u.serial AND r.grp = u.grp WHERE b.released = 0 ORDER BY b.b"
        )
        for serial in dict.fromkeys(row[0] for row in rows):
            batch = [row for row in rows if row[0] == serial]
            assert [used[group] > 0 for _, group, _, _ in batch] == [weight is not None for _, _, weight, _ in batch]
            weights = [weight for _, _, weight, _ in batch if weight is not None]
            assert len(batch) - len(weights) == 2
            assert len(weights) <= 2
            assert not weights or 0 < min(weights) <= max(weights) == 1.0
            used.update(group for _, group, _, outcome in batch if outcome == "applied")

    @invariant()
    def the_line_has_no_gap_and_versions_count_what_was_applied(self) -> None:
        version = 0
        rows = self.sql("SELECT b, version, outcome FROM batches WHERE released = 0 ORDER BY b")
        for place, (b, at, outcome) in enumerate(rows):
            assert (b, at) == (place, version)
            version += outcome == "applied"
        assert all(outcome is not None for _, _, outcome in rows[:-1])

    @invariant()
    def every_draw_is_made_once(self) -> None:
        rows = self.sql("SELECT draw, replaces, number FROM groups ORDER BY number")
        assert [number for _, _, number in rows] == list(range(len(rows)))
        first = [draw for draw, replaces, _ in rows if replaces is None]
        assert first == list(range(len(first)))
        again = [replaces for _, replaces, _ in rows if replaces is not None]
        assert len(set(again)) == len(again)
        assert all(rows[replaces][0] == draw for draw, replaces, _ in rows if replaces is not None)

    @invariant()
    def leases_are_the_attempts_that_have_not_ended(self) -> None:
        rows = self.sql("SELECT grp, idx, attempt, actor FROM attempts WHERE ended IS NULL")
        held = [(lease.id.group, lease.id.index, lease.attempt, lease.actor) for lease in self.buffer.leases]
        assert sorted(rows) == sorted(held)
        assert not {row[:2] for row in rows} & set(self.stored)

    @invariant()
    def capacity_holds(self) -> None:
        taken = self.buffer.tickets.places.taken()
        if taken <= self.options["capacity"]:
            self.over_full = False
        assert taken <= self.options["capacity"] or self.over_full

    @invariant()
    def the_bias_adds_up(self) -> None:
        fates = self.buffer.ledger.bias.fates
        assert fates["generated"].count == len(self.stored)
        for fate in ("trained", "dropped"):
            rows = self.sql(
                f"SELECT count(*) FROM trajectories t JOIN groups g ON g.number = t.grp WHERE state = '{fate}'"
            )
            assert fates[fate].count == rows[0][0]  # type: ignore[index]
