"""Which complete groups the filters drop: `buffer.filter_max_ratio` limits how many while one batch is filled.

Beyond that a rejected group is kept with weight 0, so that the learner is not starved; under `buffer.on_starved: end`
the run ends instead.
"""

from __future__ import annotations

from asyncrl.buffer.ledger.group import Group
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.rules import Rules


class Filtering:
    def __init__(self, ledger: Ledger, rules: Rules) -> None:
        self._ledger, self._rules = ledger, rules
        self._dropped = ledger.filtered_while_filling()
        self._batch = len(ledger.history.line)
        """The batch that is being filled."""
        self.starved = ledger.db.get("starved")
        """Why the run ends: filters used up their allowance under `on_starved: end`."""
        if self.starved and (self._may_drop or not rules.end_when_starved):  # resumed with other rules
            self._clear_starved()

    def drops(self, group: Group) -> bool:
        """Whether a complete group is dropped. Sets its weight to 0 if it is kept although a filter rejects it."""
        if not any(rejects(group) for rejects in self._rules.filters):
            return False
        if self._batch != len(self._ledger.history.line):
            self._batch, self._dropped = len(self._ledger.history.line), 0
        if self._may_drop:
            self._dropped += 1
            return True
        if self._rules.end_when_starved:
            self.starved = (
                f"solved: filters dropped {self._dropped} groups while batch {self._batch} was filled "
                "(buffer.filter_max_ratio), and buffer.on_starved is end"
            )
            self._ledger.db.set("starved", self.starved)
        else:
            self._ledger.unweight(group)
        return False

    def forked(self) -> None:
        """Forgets what filters did on the part of history that was left."""
        self._dropped, self._batch = 0, len(self._ledger.history.line)
        self._clear_starved()

    def _clear_starved(self) -> None:
        self.starved = None
        self._ledger.db.unset("starved")

    @property
    def _may_drop(self) -> bool:
        return self._dropped < self._rules.filter_max_ratio * self._rules.groups_per_step
