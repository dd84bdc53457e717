"""How many trajectories a task's group has: `learner.group_size`, or what the task's source says."""

from __future__ import annotations

from asyncrl.data.added_tasks import ADDED
from asyncrl.data.base import TaskSource


class GroupSizes:
    """Of a source that has `group_sizes` (all that it names) and `group_size(index)` (None: the default), or of any."""

    def __init__(self, source: TaskSource, default: int) -> None:
        """`default`: `learner.group_size`."""
        self._default = default
        self._of = getattr(source, "group_size", None)
        named = tuple(getattr(source, "group_sizes", ())) if self._of else ()
        self.largest: int = max((default, *named))
        self.smallest: int = min((default, *named))

    def of(self, index: int) -> int:
        """Of the group of the training task at `index`; the default for one that the run added."""
        return (self._of(index) if self._of and index < ADDED else None) or self._default
