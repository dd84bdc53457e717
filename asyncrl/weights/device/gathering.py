"""Which engines get a version together, by one broadcast, and which by themselves: without sockets, clocks, devices.

    ask ── ask ──── ask ┐ all that are expected are there, or `wait_s` is over    later, or a second time
    the first one opens └─> one party: one broadcast                              └─> a party of one: by itself

An engine asks when it stands still, so that nobody is waited for longer than `wait_s`. One that was not there is
expected again only after it has asked again, and by then late, later each time: an engine that is dead or has another
version holds the others up once, one that is always late a few times. The same is true of an engine that asks a second
time, because the broadcast did not reach it: an engine that no broadcast reaches gets nearly every version by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_DOUBLINGS = 6


@dataclass(frozen=True, slots=True)
class Asked:
    reader: str
    group: str = ""
    """The common group that it says it is in; empty: none."""


@dataclass(slots=True)
class _Known:
    failures: int = 0
    """Publications that it could not get together with others, since the last one that it could."""
    expected_from: int | None = 0
    """The first publication at which it is waited for; None: it was not there, and has not asked since."""
    together: int | None = None
    """The publication that it was last sent together with others, as far as is known with success."""


Party = tuple[Asked, ...]


class Gathering:
    """
    >>> gathering = Gathering(wait_s=1.0)
    >>> gathering.ask(Asked("a"), publication=1, now=0.0)
    >>> [asked.reader for party in gathering.due(0.0) for asked in party]  # nobody else is known
    ['a']
    >>> gathering.ask(Asked("b"), publication=1, now=3.0)
    >>> [asked.reader for party in gathering.due(3.0) for asked in party]
    ['b']
    >>> gathering.ask(Asked("b"), publication=2, now=5.0)
    >>> gathering.due(5.0)  # `a` is expected
    []
    >>> gathering.ask(Asked("a"), publication=2, now=5.1)
    >>> [[asked.reader for asked in party] for party in gathering.due(5.1)]
    [['b', 'a']]
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._known: dict[str, _Known] = {}
        self._publication = -1
        """The newest for which engines have gathered."""
        self._until: float | None = None
        """When this gathering ends; None: it has ended."""
        self._here: dict[str, Asked] = {}
        self._parties: list[Party] = []

    def ask(self, asked: Asked, publication: int, now: float) -> None:
        """In place of what it has asked before. `publication` counts those of this learner. `due` returns it within
        `wait_s`, in one party."""
        self._withdraw(asked.reader)
        known = self._known.setdefault(asked.reader, _Known())
        failed = known.together == publication
        if known.together is not None:
            known.failures, known.together = known.failures + 1 if failed else 0, None
        may = known.expected_from is not None and known.expected_from <= publication
        if may and publication > self._publication:
            self._end()
            self._publication, self._until = publication, now + self._wait_s
        if may and publication == self._publication and self._until is not None:
            self._here[asked.reader] = asked
            return
        self._parties.append((asked,))
        if may or failed or known.expected_from is None:
            known.expected_from = publication + (1 << min(max(known.failures - 1, 0), MOST_DOUBLINGS))

    def due(self, now: float) -> list[Party]:
        """The parties to send to now, each as one; everybody who asked is in one of them, once."""
        if self._until is not None and (now >= self._until or not self._awaited()):
            self._end()
        parties, self._parties = self._parties, []
        return parties

    def forget(self, reader: str) -> None:
        """It has ended."""
        self._known.pop(reader, None)
        self._withdraw(reader)

    def _withdraw(self, reader: str) -> None:
        self._here.pop(reader, None)
        rest = (tuple(asked for asked in party if asked.reader != reader) for party in self._parties)
        self._parties = [party for party in rest if party]

    def _awaited(self) -> list[_Known]:
        """Those who are expected and have not asked."""
        return [
            known
            for reader, known in self._known.items()
            if known.expected_from is not None and known.expected_from <= self._publication and reader not in self._here
        ]

    def _end(self) -> None:
        if self._until is None:
            return
        for known in self._awaited():
            known.failures, known.expected_from, known.together = known.failures + 1, None, None
        party, self._here, self._until = tuple(self._here.values()), {}, None
        for asked in party:
            self._known[asked.reader].expected_from = self._publication + 1
            if len(party) > 1:
                self._known[asked.reader].together = self._publication
        if party:
            self._parties.append(party)
