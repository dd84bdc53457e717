"""What an actor counts since the start of its process."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.episodes.spent import Spent


@dataclass(slots=True)
class Counts:
    """Totals since the start of the process."""

    episodes: int = 0
    aborted_tokens: int = 0
    """Tokens sampled in failed episodes, plus tokens cut off by a stop string."""
    prefix_breaks: int = 0
    begun_again: int = 0
    """Episodes that began again, since what earlier attempts recorded did not fit."""
    compactions: int = 0
    """Rows that ended with a summary, from which the next one began."""
    compacted_from: int = 0
    """Tokens of these rows."""
    compacted_to: int = 0
    """Tokens of the prompts that began from a summary."""
    environments: Spent = field(default_factory=Spent)
    """Episodes, and their seconds in the environment."""
    tools: Spent = field(default_factory=Spent)
    ignored_constraints: int = 0
    """Requests of agents whose constraints on sampling were ignored."""

    def add(self, ended: Progress) -> None:
        """Add what an episode counted, whatever became of it."""
        self.prefix_breaks += ended.prefix_breaks
        if ended.env:
            self.environments.add(ended.env, ended.seconds["environment"])
        self.tools.merge(ended.tools)
        self.begun_again += ended.begun_again
        self.compactions += ended.compactions
        self.compacted_from += ended.compacted_from
        self.compacted_to += ended.compacted_to
        self.ignored_constraints += ended.ignored_constraints
