"""The recording of one episode: what came with its ticket, and what is added to it.

    ticket.turns ──> carried: given again, in the places where they were recorded
    what is new ──keep──> the buffer: stored
                                      revoked: the attempt is not the ticket's latest, and ends
                                      no room: the episode goes on, and nothing more of it is recorded

Without durability nothing is carried and nothing is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Keep, Progress
from asyncrl.trajectory.turns import Recorded, RecordedAnswer, RecordedReset, RecordedSample, Snapshot

log = logging.getLogger(__name__)
T = TypeVar("T")


class Revoked(EpisodeFailed):
    """Another attempt may have the ticket by now: the episode ends before it steps, and no failure is reported."""

    def __init__(self, where: str) -> None:
        super().__init__("", f"{where} is of an attempt that has ended")


class PlaysOtherwise(Exception):
    """The recording does not fit the episode that is played from it; the episode begins again without."""


class Recording:
    def __init__(self, carried: Sequence[Recorded], progress: Progress) -> None:
        """`progress.keep` None: nothing is recorded, and nothing carried is used."""
        self.progress, self._keep = progress, progress.keep
        self.reset: RecordedReset | None = None
        self.samples: dict[int, RecordedSample] = {}
        self.answers: dict[int, RecordedAnswer] = {}
        self.goes_on = self.recorded = False
        """Whether the environment can go on behind what is recorded, and whether all turns are recorded; if not, an
        interrupted first sample is. Known once the environment was reset."""
        self._sending: asyncio.Task[bool] | None = None
        self._full = False
        """The buffer has no room for what the episode records."""
        for record in carried if self.durable else ():
            if isinstance(record, RecordedReset):
                self.reset = record
            elif isinstance(record, RecordedSample):
                self.samples[record.number] = record  # the whole one comes behind an interrupted one
            elif isinstance(record, RecordedAnswer):
                self.answers[record.number] = record

    @property
    def durable(self) -> bool:
        return self._keep is not None

    @property
    def answered(self) -> int:
        """Number of the last turn whose answer is carried; -1: none is."""
        return max(self.answers, default=-1)

    @property
    def interrupted(self) -> RecordedSample | None:
        """The carried action that was stepped, as far as is known, and whose answer was not recorded."""
        last = self.samples.get(max(self.samples, default=-1))
        if last is None or last.partial or last.summary or last.number in self.answers:
            return None
        return last

    @property
    def only_begun(self) -> bool:
        """Whether a part of the first sample is all that is carried beside the reset."""
        return not self.answers and [(n, s.partial) for n, s in self.samples.items()] == [(0, True)]

    @property
    def reset_messages(self) -> Sequence[Mapping[str, Any]]:
        """The recorded ones; none where the reset is not carried."""
        return () if self.reset is None else self.reset.messages

    def snapshot(self) -> tuple[int, Snapshot | None]:
        """The latest snapshot, and the turn that it is behind; of the reset, -1."""
        for number in sorted(self.answers, reverse=True):
            if self.answers[number].snapshot is not None:
                return number, self.answers[number].snapshot
        return -1, None if self.reset is None else self.reset.snapshot

    def begin_again(self, why: str = "") -> None:
        """Forget what is carried: what is recorded from here takes its place. `why`: is reported, and counted."""
        if why:
            log.warning("an episode begins again: %s", why)
            self.progress.begun_again += 1
        self.progress.tokens = self.progress.kept_tokens = 0
        self.reset, self.samples, self.answers = None, {}, {}

    async def add(self, record: Recorded) -> bool:
        """Returns whether the record and those before it are stored, once they are. Raises EpisodeFailed."""
        if self._keep is None or self._full:
            return False
        self.progress.enter("record")
        try:
            await self.sent()
            return await self._kept(self._keep, record)
        finally:
            self.progress.enter("environment")

    def add_soon(self, record: Recorded) -> None:
        """Send the record; the next `add` waits until it is stored. At most one is under way."""
        if self._keep is not None and not self._full:
            self._sending = asyncio.ensure_future(self._after(self._sending, self._keep, record))

    async def played(self, episode: Callable[[], Awaitable[T]]) -> T:
        """What `episode` gives, from what is carried or, where that does not fit, from its beginning."""
        try:
            while True:
                try:
                    return await episode()
                except PlaysOtherwise as why:
                    self.begin_again(str(why))
        finally:
            await self._close()

    async def _close(self) -> None:
        """End what is being sent."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def sent(self) -> None:
        """Returns when everything added so far is stored. Raises EpisodeFailed."""
        sending, self._sending = self._sending, None
        if sending is not None:
            await sending

    async def _after(self, before: asyncio.Task[bool] | None, keep: Keep, record: Recorded) -> bool:
        if before is not None:
            await before
        return await self._kept(keep, record)

    async def _kept(self, keep: Keep, record: Recorded) -> bool:
        """Whether the record is stored. Behind one that is not, none can be."""
        if not self._full and not await keep(record):
            self._full, self.recorded = True, False
        return not self._full
