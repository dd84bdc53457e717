"""The ledger: every group in exactly one state, every change of state one method, durable with the next commit.

      issue             record_trajectory (the last)      fix                 finish
  ─────────────> in_flight ─────────────────────────> waiting ──────> assigned ─────────> trained
                     │                                  │  ^              │ another use
                     │              drop                │  └──────────────┤
                     └──────────────────────────────────┴────> dropped <──┘ guard, poison

    issued = in flight + waiting + assigned + trained + dropped(reason), per branch

The live groups (the first three states) are held in memory as well; `equation` counts both ways. Decisions are made
elsewhere (core.py): a transition that the picture does not show raises IllegalTransition.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from asyncrl.buffer.client.messages import Outcome
from asyncrl.buffer.ledger.account import Account
from asyncrl.buffer.ledger.attempts import FILTERED
from asyncrl.buffer.ledger.drop_bias import Bias
from asyncrl.buffer.ledger.group import Group, Reason, Received, State
from asyncrl.buffer.ledger.history import History, IllegalTransition
from asyncrl.buffer.ledger.records import Batch, insert_group, insert_trajectory, one, read_groups
from asyncrl.buffer.ledger.storage.branches import Branches
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.ledger.unmeasured import Unmeasured

_ENDED = "UPDATE groups SET ended_batch = ?, ended_branch = ?, ended_at = ? WHERE number = ?"


class Ledger:
    def __init__(self, database: Database, checkpoints: Path | None = None) -> None:
        """`checkpoints`: their folder, where the numbers of branches are noted; None: nowhere."""
        self.db = database
        self.history = History(database, Branches(database, checkpoints))
        self.account = Account(database)
        self.bias = Bias(database)
        self.live = read_groups(database, "g.state IN ('in_flight', 'waiting', 'assigned')")
        """In flight, waiting or assigned, by number, in issue order."""
        self._next_number: int = one(database, "SELECT coalesce(max(number), -1) + 1 FROM groups")
        self.next_draw = int(database.get("next_draw") or 0)
        """Index of the first draw that was never made."""
        self.attempts: int = one(database, "SELECT count(*) FROM attempts")
        """How many were issued."""
        self.unmeasured = Unmeasured(database, lambda number: self.live.get(number) or self._load(number))

    # Groups

    def issue(
        self, size: int, task_id: str, task: int, curriculum: int, put_back: Group | None = None, env: str = ""
    ) -> Group:
        """-> in flight. The next draw, or the prompt of a dropped group drawn again. `env`: of the task, in a mix."""
        draw = self.next_draw if put_back is None else put_back.draw
        group = Group(self._next_number, self.history.branch, draw, task_id, size, "in_flight")
        group.task, group.curriculum, group.task_env = task, curriculum, env
        if put_back is None:
            self.next_draw += 1
            self.db.set("next_draw", str(self.next_draw))
        else:
            group.replaces = put_back.number
            self.db.write("UPDATE groups SET put_back = 0 WHERE number = ?", (put_back.number,))
        insert_group(self.db, group)
        self._next_number += 1
        self.account.issued(group)
        self.live[group.number] = group
        return group

    def put_back(self) -> Group | None:
        """The oldest dropped group whose prompt waits to be drawn again."""
        row = next(iter(self.db.read("SELECT number FROM groups WHERE put_back = 1 ORDER BY number LIMIT 1")), None)
        return None if row is None else self._load(row[0])

    def start_attempt(self, group: Group, index: int, actor: str, min_version: int) -> int:
        """A new attempt at a ticket whose trajectory is not stored; returns its number."""
        self._require(group, "in_flight")
        if group.stored[index] is not None:
            raise IllegalTransition(f"trajectory {group.number}.{index} is stored: its ticket cannot be issued")
        attempt = group.attempts[index]
        group.attempts[index] += 1
        when = self.db.wall_clock(), self.attempts
        self.db.write(
            "INSERT INTO attempts(grp, idx, attempt, actor, branch, min_version, issued_at, serial) "
            "VALUES (?,?,?,?,?,?,?,?)",
            (group.number, index, attempt, actor, self.history.branch, min_version, *when),
        )
        self.attempts += 1
        return attempt

    def end_attempt(self, number: int, index: int, attempt: int, how: str, detail: str | None = None) -> None:
        """How: stored, late, lapsed, released, failed, revoked. The first ending stays unless a put comes
        after it; an attempt whose trajectory the disk lost stays lost."""
        put = how in ("stored", "late")
        self.db.write(
            "UPDATE attempts SET ended = ?, detail = ?, ended_at = ?, ended_serial = coalesce(ended_serial, ?) "
            "WHERE grp = ? AND idx = ? AND attempt = ?" + (" AND ended IS NOT 'lost'" if put else " AND ended IS NULL"),
            (how, detail, self.db.wall_clock(), self.attempts, number, index, attempt),
        )
        if how == "failed" and number in self.live:
            self.live[number].failures[index] += 1

    def record_trajectory(self, group: Group, index: int, r: Received) -> None:
        """Stores one trajectory of a group in flight; the last one moves the group to waiting."""
        self._require(group, "in_flight")
        if group.stored[index] is not None:
            raise IllegalTransition(f"trajectory {group.number}.{index} is stored already")
        group.store(index, r)
        insert_trajectory(self.db, group.number, index, r)
        self.end_attempt(group.number, index, r.attempt, "stored")
        self.bias.generated(r)
        if group.complete:
            self._move(group, "waiting")
            self.unmeasured.add(group)

    def lose(self, group: Group, index: int) -> None:
        """The disk lost a stored trajectory: its ticket is issued again, and its group is in flight."""
        self._require(group, "in_flight", "waiting")
        if group.state == "waiting":
            self._move(group, "in_flight")
        lost = group.stored[index]
        if lost is None:
            raise IllegalTransition(f"trajectory {group.number}.{index} is not stored")
        self.bias.generated(lost, -1)
        group.store(index, None)
        self.unmeasured.discard(group)
        at = group.number, index
        self.db.write("DELETE FROM trajectories WHERE grp = ? AND idx = ?", at)
        self.db.write("UPDATE attempts SET ended = 'lost' WHERE grp = ? AND idx = ? AND ended = 'stored'", at)
        self.bump("lost")

    def drop(self, group: Group, reason: Reason, put_back: bool = False) -> None:
        """In flight or waiting -> dropped; the prompt is drawn again if `put_back`."""
        self._require(group, "in_flight", "waiting")
        if group.uses:
            raise IllegalTransition(f"group {group.number} was trained on and cannot be dropped: {reason}")
        self._end(group, "dropped", reason)
        if put_back:
            self.db.write("UPDATE groups SET put_back = 1 WHERE number = ?", (group.number,))
        if reason == "filtered":
            self.db.write("UPDATE groups SET filling = ? WHERE number = ?", (len(self.history.line), group.number))

    def retire(self, group: Group) -> None:
        """Waiting, used before, and no further use possible -> trained."""
        self._require(group, "waiting")
        if not group.uses:
            raise IllegalTransition(f"group {group.number} was never trained on")
        self._end(group, "trained", None)

    def unweight(self, group: Group) -> None:
        """A filter rejected the group, but it is kept: it is trained on with advantage 0."""
        group.weight = 0.0
        self.db.write("UPDATE groups SET weight = 0 WHERE number = ?", (group.number,))

    def filtered_while_filling(self) -> int:
        """Groups that filters dropped on this branch since the last batch was fixed."""
        return int(one(self.db, FILTERED, (len(self.history.line), self.history.branch)))

    # Batches

    def fix(self, b: int, version: int, groups: Sequence[Group]) -> Batch:
        """Waiting -> assigned: the next batch of the line, for good."""
        for group in groups:
            self._require(group, "waiting")
        if len({group.number for group in groups}) != len(groups):
            raise IllegalTransition(f"batch {b} holds a group twice")
        numbers = [group.number for group in groups]
        batch = self.history.fix(b, version, numbers, sum(group.uses == 0 for group in groups))
        for group in groups:
            self._move(group, "assigned")
        return batch

    def finish(self, b: int, outcome: Outcome, again: Collection[int] = ()) -> None:
        """Assigned -> trained, or dropped: the outcome's name; -> waiting for groups in `again`, if applied."""
        for number in self.history.finish(b, outcome).groups:
            group = self.live[number]
            self._require(group, "assigned")
            if outcome == "applied":
                group.uses += 1
                self.db.write("UPDATE groups SET uses = ? WHERE number = ?", (group.uses, number))
            if outcome == "applied" and number in again:
                self._move(group, "waiting")
            elif group.uses:
                self._end(group, "trained", None, b + 1)
            else:
                self._end(group, "dropped", "guard" if outcome == "guard" else "poison", b + 1)

    def undo_use(self, number: int, outcome: Outcome | None) -> None:
        """Assigned, trained or dropped -> waiting, as before its use in a batch with this outcome."""
        group = self.live.get(number) or self._load(number)
        if outcome == "applied":
            group.uses -= 1
            self.db.write("UPDATE groups SET uses = ? WHERE number = ?", (group.uses, number))
        if group.state != "waiting":
            self._move(group, "waiting")
            self.db.write(_ENDED, (None, None, None, number))
            self.live[number] = group

    # Reads

    def load(self, number: int) -> Group | None:
        """Any group that was ever issued."""
        if number in self.live:
            return self.live[number]
        return self._load(number) if 0 <= number < self._next_number else None

    def has_payload(self, number: int) -> bool:
        return bool(one(self.db, "SELECT payload FROM groups WHERE number = ?", (number,)))

    def bump(self, name: str) -> None:
        """Counts a duplicate, late or lost put on this branch."""
        self.account.bump(self.history.branch, name)

    def _load(self, number: int) -> Group:
        return read_groups(self.db, "g.number = ?", (number,))[number]

    def _move(self, group: Group, state: State, reason: Reason | None = None) -> None:
        self.bias.moved(group, state, reason)
        self.account.moved(group, state, reason)
        group.state, group.reason = state, reason
        self.db.write("UPDATE groups SET state = ?, reason = ? WHERE number = ?", (state, reason, group.number))

    def _end(self, group: Group, state: State, reason: Reason | None, ended_batch: int | None = None) -> None:
        self._move(group, state, reason)
        batch = len(self.history.line) if ended_batch is None else ended_batch
        self.db.write(_ENDED, (batch, self.history.branch, self.db.wall_clock(), group.number))
        del self.live[group.number]

    def _require(self, group: Group, *states: State) -> None:
        if group.state not in states or self.live.get(group.number) is not group:
            raise IllegalTransition(f"group {group.number} is {group.state}, expected {' or '.join(states)}")
