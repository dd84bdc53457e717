"""The account in memory: groups by branch and state, and the puts that were not stored."""

from __future__ import annotations

from collections import Counter

from asyncrl.buffer.ledger.group import Group, Reason, State
from asyncrl.buffer.ledger.storage.database import Database


class Account:
    """
    issued = in flight + waiting + assigned + trained + dropped(reason), per branch
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._states: Counter[tuple[int, str]] = Counter()
        self._issued: Counter[int] = Counter()
        for branch, state, reason, n in database.read(
            "SELECT branch, state, reason, count(*) FROM groups GROUP BY 1, 2, 3"
        ):
            self._states[branch, _name(state, reason)] += n
            self._issued[branch] += n
        self.counters: Counter[tuple[int, str]] = Counter()
        """duplicate, late and lost puts, by (branch, name)."""
        for branch, name, value in database.read("SELECT branch, name, value FROM counters"):
            self.counters[branch, name] = value

    def issued(self, group: Group) -> None:
        self._issued[group.branch] += 1
        self._states[group.branch, "in_flight"] += 1

    def moved(self, group: Group, state: State, reason: Reason | None) -> None:
        """A group changes from its state to `state`."""
        self._states[group.branch, _name(group.state, group.reason)] -= 1
        self._states[group.branch, _name(state, reason)] += 1

    def bump(self, branch: int, name: str) -> None:
        """Counts a duplicate, late or lost put."""
        self.counters[branch, name] += 1
        self._db.write("INSERT OR REPLACE INTO counters VALUES (?, ?, ?)", (branch, name, self.counters[branch, name]))

    def equation(self, branch: int) -> dict[str, int]:
        """`issued` and every state; dropped groups as `dropped: reason`."""
        return {"issued": self._issued[branch]} | {
            state: n for (b, state), n in sorted(self._states.items()) if b == branch and n
        }

    def count(self, *states: State) -> int:
        """Live groups in these states, whatever branch they were issued on."""
        return sum(n for (_, state), n in self._states.items() if state in states)


def _name(state: str, reason: str | None) -> str:
    return state if reason is None else f"{state}: {reason}"
