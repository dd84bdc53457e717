"""The size of a task's group: `learner.group_size`, unless the task's source sets another."""

from __future__ import annotations

from asyncrl.data.added_tasks import ADDED
from asyncrl.data.base import TaskSource


class GroupSizes:
    """Group sizes of a source. One that sets its own has `group_sizes` (all) and `group_size(index)` (or None)."""

    def __init__(self, source: TaskSource, default: int) -> None:
        """`default`: `learner.group_size`."""
        self._default = default
        self._of = getattr(source, "group_size", None)
        named = tuple(getattr(source, "group_sizes", ())) if self._of else ()
        self.largest: int = max((default, *named))
        self.smallest: int = min((default, *named))

    def of(self, index: int) -> int:
        """Size of the group of the training task at `index`; the default for a task that the run added."""
        return (self._of(index) if self._of and index < ADDED else None) or self._default
