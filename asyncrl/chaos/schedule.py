"""When each planned fault begins and ends in a run. Pure: time, in seconds since the first training step, is an
argument."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.chaos.plan import Fault


class Schedule:
    """Faults begin in their order. One that begins late, because its target was missing, delays those after it.

    >>> halt, kill = Fault(10.0, "stop", "buffer", for_s=5.0), Fault(20.0, "actor", "actor-0")
    >>> schedule = Schedule([halt, kill], within_s=60.0)
    >>> schedule.due(9.0), schedule.due(12.0) is halt
    (None, True)
    >>> schedule.begin(halt, 12.0)
    >>> schedule.ended(16.0), schedule.ended(17.0) == [halt]
    ([], True)
    >>> schedule.due(21.0), schedule.due(22.0) is kill
    (None, True)
    """

    def __init__(self, faults: Sequence[Fault], within_s: float) -> None:
        """`within_s`: the time that the run has to end after the last fault."""
        self.begun: list[Fault] = []
        self._left = list(faults)
        self._passing: dict[Fault, float] = {}
        """Faults under way that pass, and when each ends."""
        self._delay_s = 0.0
        self._end_s = (faults[-1].at_s if faults else 0.0) + within_s

    def due(self, now: float) -> Fault | None:
        """The next fault, once its time has come: of each kind one fault at a time is under way."""
        if not self._left or now < self._left[0].at_s + self._delay_s:
            return None
        fault = self._left[0]
        return None if any(other.kind == fault.kind for other in self._passing) else fault

    def begin(self, fault: Fault, now: float) -> None:
        """Counts the due fault as begun."""
        self._left.remove(fault)
        self.begun.append(fault)
        self._delay_s = now - fault.at_s
        if fault.for_s:
            self._passing[fault] = now + fault.for_s

    def ended(self, now: float) -> list[Fault]:
        """Removes and gives the faults whose time is up; all of them for `now` infinite."""
        ended = [fault for fault, until in self._passing.items() if now >= until]
        for fault in ended:
            del self._passing[fault]
        return ended

    def overdue(self, now: float) -> bool:
        """Whether the run should have ended."""
        return now > self._end_s + self._delay_s
