"""Requests that wait for their answer, in the order in which they came.

They stand in a line for each kind; of a line only the first is tried, so a round costs the same however many wait. A
peer that has gone leaves its line when it is its turn, before anything is given to it.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.client.messages import Request
from asyncrl.buffer.requests.handlers import Answer, Handler
from asyncrl.buffer.rules import Refused

_MAX_HELD = 16384
_MAX_HELD_OF_ONE = 64
_ENDED_AT_ONCE = 64
"""Requests whose time is over and that are answered in one round."""
_TRUSTED_S = 0.25
"""Seconds for which a peer that was heard or reached is taken to be connected."""

Key = tuple[bytes, int]


@dataclass(slots=True)
class HeldRequest:
    peer: bytes
    request: Request[Any]
    handler: Handler[Any]
    until: float
    reached: float
    """When its peer was last heard or reached."""

    @property
    def key(self) -> Key:
        return self.peer, self.request.n


class HeldRequests:
    def __init__(self, reaches: Callable[[bytes], bool]) -> None:
        """`reaches` tells whether a peer is connected."""
        self._reaches = reaches
        self._held: OrderedDict[Key, HeldRequest] = OrderedDict()
        self._lines: dict[Hashable, deque[HeldRequest]] = {}
        self._until: list[tuple[float, Key]] = []
        self._per_peer: Counter[bytes] = Counter()
        self.retry_at = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: HeldRequest) -> None:
        """A repeat of a request that is held already changes nothing.

        Raises Refused when this peer has too many held. When too many are held in all, the oldest is answered as it
        stands.
        """
        if held.key in self._held:
            return
        if self._per_peer[held.peer] >= _MAX_HELD_OF_ONE:
            raise Refused("busy", f"{self._per_peer[held.peer]} requests of this peer are waiting already")
        if len(self._held) >= _MAX_HELD:
            oldest = next(iter(self._held.values()))
            heapq.heappush(self._until, (float("-inf"), oldest.key))
        self._held[held.key] = held
        self._per_peer[held.peer] += 1
        self._line_of(held).append(held)
        heapq.heappush(self._until, (held.until, held.key))

    def answered(self, now: float) -> Iterator[tuple[HeldRequest, Answer | Refused]]:
        """Removes the requests that can be answered now and those whose time is over, and yields their answers."""
        for name in list(self._lines):
            yield from self._advance(name, now)
        ended = 0
        while self._until and self._until[0][0] <= now and (ended < _ENDED_AT_ONCE or now == float("inf")):
            held = self._held.get(heapq.heappop(self._until)[1])
            if held is None:
                continue  # it was answered before
            ended += 1
            if (answer := self._try(held, now, at_once=True)) is not None:
                yield held, answer
        self.retry_at = now + min((line[0].handler.retry_s for line in self._lines.values()), default=0.0)

    def _advance(self, name: Hashable, now: float) -> Iterator[tuple[HeldRequest, Answer | Refused]]:
        """Answers a line from its head, until one finds no answer."""
        line = self._lines[name]
        while line:
            held = line[0]
            if self._held.get(held.key) is not held:
                line.popleft()
            elif (answer := self._try(held, now, at_once=False)) is not None:
                yield held, answer
            elif held.key in self._held:
                return
        del self._lines[name]

    def _try(self, held: HeldRequest, now: float, at_once: bool) -> Answer | Refused | None:
        """None: it has no answer yet, or its peer is gone; then it is held no longer."""
        if now - held.reached > _TRUSTED_S:
            if not self._reaches(held.peer):
                self._remove(held)
                return None
            held.reached = now
        answer: Answer | Refused | None
        try:
            answer = held.handler.answer(held.request, (), at_once)
        except Refused as error:
            answer = error
        if answer is not None:
            self._remove(held)
        return answer

    def _line_of(self, held: HeldRequest) -> deque[HeldRequest]:
        return self._lines.setdefault((type(held.request), held.handler.alike(held.request)), deque())

    def _remove(self, held: HeldRequest) -> None:
        del self._held[held.key]
        self._per_peer[held.peer] -= 1
        if not self._per_peer[held.peer]:
            del self._per_peer[held.peer]
