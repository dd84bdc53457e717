"""The drop bias: length, turns, reward and environment of generated, trained and dropped trajectories.

If the rules for dropping remove mainly long episodes, these numbers show it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.buffer.ledger.group import Group, Received
from asyncrl.buffer.ledger.storage.database import Database

Fate = Literal["generated", "trained", "dropped"]


@dataclass(slots=True)
class Tally:
    """Sums over trajectories."""

    count: int = 0
    tokens: int = 0
    """Policy tokens."""
    turns: int = 0
    reward: float = 0.0
    envs: Counter[str] = field(default_factory=Counter)

    def add(self, env: str, count: int, tokens: int, turns: int, reward: float) -> None:
        self.count += count
        self.tokens += tokens
        self.turns += turns
        self.reward += reward
        self.envs[env] += count


class Bias:
    def __init__(self, database: Database) -> None:
        self.fates: dict[Fate, Tally] = {"generated": Tally(), "trained": Tally(), "dropped": Tally()}
        self.wasted: Counter[str] = Counter()
        """Policy tokens of dropped groups, by reason, since this process began."""
        for state, *totals in database.read(
            "SELECT g.state, t.env, count(*), sum(t.policy_tokens), sum(t.turns), sum(t.reward) "
            "FROM trajectories t JOIN groups g ON g.number = t.grp GROUP BY 1, 2"
        ):
            self.fates["generated"].add(*totals)
            if state in ("trained", "dropped"):
                self.fates["trained" if state == "trained" else "dropped"].add(*totals)

    def generated(self, r: Received, sign: int = 1) -> None:
        self.fates["generated"].add(r.env, sign, sign * r.policy_tokens, sign * r.turns, sign * r.reward)

    def moved(self, group: Group, state: str, reason: str | None) -> None:
        """A group changes from its state to `state`."""
        for tally, sign in [*self._of(group.state, -1), *self._of(state, 1)]:
            for r in group.trajectories:
                tally.add(r.env, sign, sign * r.policy_tokens, sign * r.turns, sign * r.reward)
        if state == "dropped" and reason is not None:
            self.wasted[reason] += group.policy_tokens()

    def _of(self, state: str, sign: int) -> Iterator[tuple[Tally, int]]:
        if state in ("trained", "dropped"):
            yield self.fates["trained" if state == "trained" else "dropped"], sign
