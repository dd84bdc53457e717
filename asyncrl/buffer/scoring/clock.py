"""The clock of `buffer.wait_s` where groups need scores: it stands still while no scorer answers. Pure."""

from __future__ import annotations


class AnsweredClock:
    """
    >>> clock = AnsweredClock(patience_s=5.0, now=0.0)
    >>> clock.heard(0.0, "scorer-0")
    >>> clock(4.0)  # a scorer was heard within the last five seconds
    4.0
    >>> clock(30.0)  # at 5.0 it was taken to be silent
    5.0
    >>> clock.heard(40.0, "scorer-0")
    >>> clock.silent(41.0, "scorer-0")  # it says that its teacher does not answer
    >>> clock(43.0)
    6.0
    """

    def __init__(self, patience_s: float, now: float) -> None:
        """`patience_s`: a scorer that was heard so long ago still counts as answering."""
        self._patience_s, self._at, self._counted = patience_s, now, 0.0
        self._until: dict[str, float] = {}
        """When each scorer that answers is taken to be silent, unless it is heard again."""

    def heard(self, now: float, scorer: str) -> None:
        """A scorer whose teacher answers asked for work."""
        self(now)
        self._until[scorer] = now + self._patience_s

    def silent(self, now: float, scorer: str) -> None:
        """A scorer says that its teacher does not answer: without another one, the clock stops at once."""
        self(now)
        self._until.pop(scorer, None)

    def answers(self, now: float) -> bool:
        return now < self._latest

    def __call__(self, now: float) -> float:
        """Seconds so far during which a scorer answered."""
        self._counted += max(0.0, min(now, self._latest) - self._at)
        self._at = max(self._at, now)
        return self._counted

    @property
    def _latest(self) -> float:
        return max(self._until.values(), default=float("-inf"))
