"""The ledger: every group in exactly one state, every change of state one method, durable with the next commit.

        issue                 receive (the last one)        fix                 finish
  ─────────────> in_flight ─────────────────────────> waiting ──────> assigned ─────────> trained
                     │                                  │  ^              │ another use
                     │              drop                │  └──────────────┤
                     └──────────────────────────────────┴────> dropped <──┘ guard, poison

    issued = in flight + waiting + assigned + trained + dropped(reason), per branch

The groups that live (the first three states) are held in memory as well; `equation` counts both ways. Decisions are
made elsewhere (core.py): a transition that the picture does not show raises IllegalTransition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from asyncrl.buffer.ledger.database import Database
from asyncrl.buffer.ledger.drop_bias import Bias
from asyncrl.buffer.ledger.group import Group, Outcome, Reason, Received, State
from asyncrl.buffer.ledger.history import Batch, History, IllegalTransition
from asyncrl.buffer.ledger.records import insert_group, insert_trajectory, read_groups


class Ledger:
    def __init__(self, database: Database) -> None:
        self.db = database
        self.history = History(database)
        self.bias = Bias(database)
        self.live = read_groups(database, "g.state IN ('in_flight', 'waiting', 'assigned')")
        """In flight, waiting or assigned, by number, in issue order."""
        self._next_number: int = next(iter(database.read("SELECT coalesce(max(number), -1) + 1 FROM groups")))[0]
        self.next_draw = int(database.get("next_draw") or 0)
        """Index of the first draw that was never made."""
        self._counts: Counter[tuple[int, str]] = Counter()
        self._issued: Counter[int] = Counter()
        for branch, state, reason, n in database.read(
            "SELECT branch, state, reason, count(*) FROM groups GROUP BY 1, 2, 3"
        ):
            self._counts[branch, _name(state, reason)] += n
            self._issued[branch] += n
        self.completed = [self.live.get(number) or self._load(number) for number in self._unmeasured()]
        """Groups of which the curriculum does not know yet."""
        self.counters: Counter[tuple[int, str]] = Counter()
        for branch, name, value in database.read("SELECT branch, name, value FROM counters"):
            self.counters[branch, name] = value

    # Groups

    def issue(self, size: int, task_id: str, task: int, curriculum: int, put_back: Group | None = None) -> Group:
        """-> in flight. The next draw, or the prompt of a dropped group drawn again."""
        draw = self.next_draw if put_back is None else put_back.draw
        group = Group(self._next_number, self.history.branch, draw, task_id, size, "in_flight")
        group.task, group.curriculum = task, curriculum
        if put_back is None:
            self.next_draw += 1
            self.db.set("next_draw", str(self.next_draw))
        else:
            group.replaces = put_back.number
            self.db.write("UPDATE groups SET put_back = 0 WHERE number = ?", (put_back.number,))
        insert_group(self.db, group)
        self._next_number += 1
        self._issued[group.branch] += 1
        self._counts[group.branch, "in_flight"] += 1
        self.live[group.number] = group
        return group

    def put_back(self) -> Group | None:
        """The oldest dropped group whose prompt waits to be drawn again."""
        row = next(iter(self.db.read("SELECT number FROM groups WHERE put_back = 1 ORDER BY number LIMIT 1")), None)
        return None if row is None else self._load(row[0])

    def lend(self, group: Group, index: int, actor: str, min_version: int) -> int:
        """A new attempt at a ticket that is not stored; gives its number."""
        self._require(group, "in_flight")
        if group.stored[index] is not None:
            raise IllegalTransition(f"trajectory {group.number}.{index} is stored and cannot be lent")
        attempt = group.attempts[index]
        group.attempts[index] += 1
        self.db.write(
            "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, NULL, NULL)",
            (group.number, index, attempt, actor, min_version),
        )
        return attempt

    def end_attempt(self, number: int, index: int, attempt: int, how: str, detail: str | None = None) -> None:
        """stored, late, lapsed, released, handed_back, failed, revoked. The first ending stays, but a put may come
        after it; that the disk lost one is never forgotten."""
        put = how in ("stored", "late")
        self.db.write(
            "UPDATE attempts SET ended = ?, detail = ? WHERE grp = ? AND idx = ? AND attempt = ?"
            + (" AND ended IS NOT 'lost'" if put else " AND ended IS NULL"),
            (how, detail, number, index, attempt),
        )
        if how == "failed" and number in self.live:
            self.live[number].failures[index] += 1

    def receive(self, group: Group, index: int, r: Received) -> None:
        """One trajectory of a group in flight, stored; the last one makes the group wait."""
        self._require(group, "in_flight")
        if group.stored[index] is not None:
            raise IllegalTransition(f"trajectory {group.number}.{index} is stored already")
        group.keep(index, r)
        insert_trajectory(self.db, group.number, index, r)
        self.end_attempt(group.number, index, r.attempt, "stored")
        self.bias.generated(r)
        if group.complete:
            self._move(group, "waiting")
            if group.measured is None:
                self.completed.append(group)

    def lose(self, group: Group, index: int) -> None:
        """The disk lost a stored trajectory: its ticket is lent again, and a group that waited is in flight."""
        self._require(group, "in_flight", "waiting")
        if group.state == "waiting":
            self._move(group, "in_flight")
        lost = group.stored[index]
        if lost is None:
            raise IllegalTransition(f"trajectory {group.number}.{index} is not stored")
        self.bias.generated(lost, -1)
        group.keep(index, None)
        self.completed = [g for g in self.completed if g is not group]
        self.db.write("DELETE FROM trajectories WHERE grp = ? AND idx = ?", (group.number, index))
        self.db.write(
            "UPDATE attempts SET ended = 'lost' WHERE grp = ? AND idx = ? AND ended = 'stored'", (group.number, index)
        )
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
        """Kept although a filter refuses it: it is trained on with advantage 0."""
        group.weight = 0.0
        self.db.write("UPDATE groups SET weight = 0 WHERE number = ?", (group.number,))

    def filtered_while_filling(self) -> int:
        """Groups that filters dropped since the last batch was fixed."""
        at = len(self.history.line), self.history.branch
        rows = self.db.read("SELECT count(*) FROM groups WHERE filling = ? AND branch = ?", at)
        return int(next(iter(rows))[0])

    # What the curriculum knows

    def measure(self, group: Group, serial: int) -> None:
        """The rewards of a complete group are known to the curriculum's state `serial`."""
        group.measured = serial
        self.db.write("UPDATE groups SET measured = ? WHERE number = ?", (serial, group.number))

    def unmeasure(self, serial: int) -> None:
        """States after `serial` are void: live groups that they knew are to be told again."""
        self.completed = [group for group in self.completed if group.reason != "discarded_branch"]
        for group in self.live.values():
            if group.measured is not None and group.measured > serial:
                group.measured = None
                self.db.write("UPDATE groups SET measured = NULL WHERE number = ?", (group.number,))
                self.completed.append(group)

    def _unmeasured(self) -> list[int]:
        rows = self.db.read(
            "SELECT number FROM groups g WHERE measured IS NULL AND reason IS NOT 'discarded_branch' "
            "AND (SELECT count(*) FROM trajectories WHERE grp = number) = size"
        )
        return [row[0] for row in rows]

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

    def fork(self, b: int, version: int, why: str) -> None:
        """A new branch at batch b. What the new history could not have produced is dropped and drawn again."""
        for batch in self.history.fork(b, version, why):
            for number in batch.groups:
                self._release(number, batch)
        self.live = dict(sorted(self.live.items()))
        for group in list(self.live.values()):
            if group.state == "in_flight" or (group.newest or 0) > version:
                self.drop(group, "discarded_branch", put_back=True)

    def _release(self, number: int, batch: Batch) -> None:
        """Undoes one use. A group whose arrays are gone cannot wait again."""
        group = self.live.get(number) or self._load(number)
        if batch.outcome == "applied":
            group.uses -= 1
            self.db.write("UPDATE groups SET uses = ? WHERE number = ?", (group.uses, number))
        if group.state != "waiting":
            self._move(group, "waiting")
            self.db.write("UPDATE groups SET ended_batch = NULL WHERE number = ?", (number,))
            self.live[number] = group
        if not self.has_payload(number):
            if group.uses:
                self.retire(group)
            else:
                self.drop(group, "discarded_branch", put_back=True)

    # What is known

    def equation(self, branch: int) -> dict[str, int]:
        """`issued` and every state; dropped groups as `dropped: reason`."""
        return {"issued": self._issued[branch]} | {
            s: n for (b, s), n in sorted(self._counts.items()) if b == branch and n
        }

    def count(self, state: State) -> int:
        """Live groups in a state, whatever branch they were issued on."""
        return sum(n for (_, s), n in self._counts.items() if s == state)

    def load(self, number: int) -> Group | None:
        """Any group that was ever issued."""
        if number in self.live:
            return self.live[number]
        return self._load(number) if 0 <= number < self._next_number else None

    def has_payload(self, number: int) -> bool:
        return bool(next(iter(self.db.read("SELECT payload FROM groups WHERE number = ?", (number,))))[0])

    def outstanding(self) -> Iterator[tuple[int, int, int, str, int]]:
        """(group, index, attempt, actor, min_version) of every attempt that has not ended."""
        yield from self.db.read("SELECT grp, idx, attempt, actor, min_version FROM attempts WHERE ended IS NULL")

    def bump(self, name: str, by: int = 1) -> None:
        """Counts duplicate, late and lost puts, per branch."""
        key = (self.history.branch, name)
        self.counters[key] += by
        self.db.write("INSERT OR REPLACE INTO counters VALUES (?, ?, ?)", (*key, self.counters[key]))

    def _load(self, number: int) -> Group:
        return read_groups(self.db, "g.number = ?", (number,))[number]

    def _move(self, group: Group, state: State, reason: Reason | None = None) -> None:
        self.bias.moved(group, state, reason)
        self._counts[group.branch, _name(group.state, group.reason)] -= 1
        group.state, group.reason = state, reason
        self._counts[group.branch, _name(state, reason)] += 1
        self.db.write("UPDATE groups SET state = ?, reason = ? WHERE number = ?", (state, reason, group.number))

    def _end(self, group: Group, state: State, reason: Reason | None, ended_batch: int | None = None) -> None:
        self._move(group, state, reason)
        end = len(self.history.line) if ended_batch is None else ended_batch
        self.db.write("UPDATE groups SET ended_batch = ? WHERE number = ?", (end, group.number))
        del self.live[group.number]

    def _require(self, group: Group, *states: State) -> None:
        if group.state not in states or self.live.get(group.number) is not group:
            raise IllegalTransition(f"group {group.number} is {group.state}, expected {' or '.join(states)}")


def _name(state: str, reason: str | None) -> str:
    return state if reason is None else f"{state}: {reason}"
