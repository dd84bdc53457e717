"""All updates of a training step are applied, or none."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol


class Refused(Exception):
    """The guard refuses an update; the message says which number."""


class Trained(Protocol):
    """A backend or a critic: weights with a gradient and an optimizer."""

    def mark(self) -> None: ...
    def discard(self) -> None: ...
    def rollback(self) -> None: ...


class Rollback:
    """Takes back every update of a training step when one of them raises Refused, which goes no further."""

    def __init__(self, trained: Sequence[Trained], updates: int) -> None:
        self._trained, self._updates = trained, updates
        self.applied = 0
        """Updates so far"""
        self.why = ""
        """The reason of a refusal"""

    def __enter__(self) -> Rollback:
        if self._updates > 1:
            for one in self._trained:
                one.mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Refused):
            return False
        self.why = str(error)
        for one in self._trained:
            one.discard()
            if self.applied:
                one.rollback()
        return True
