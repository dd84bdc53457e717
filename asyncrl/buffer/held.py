"""Requests that wait for their answer, in the order in which they came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.client.messages import Request
from asyncrl.buffer.requests import Answer, Handler
from asyncrl.buffer.rules import Refused

_MAX_HELD = 16384
_MAX_HELD_OF_ONE = 64


@dataclass(frozen=True, slots=True)
class HeldRequest:
    peer: bytes
    request: Request[Any]
    handler: Handler[Any]
    until: float


class HeldRequests:
    def __init__(self) -> None:
        self._held: dict[tuple[bytes, int], HeldRequest] = {}
        self._per_peer: Counter[bytes] = Counter()
        self.retry_at = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: HeldRequest) -> None:
        """A repeat of a request that is held already changes nothing. Raises Refused when too many are held."""
        key, peer = (held.peer, held.request.n), held.peer
        if key in self._held:
            return
        if len(self._held) >= _MAX_HELD or self._per_peer[peer] >= _MAX_HELD_OF_ONE:
            mine = self._per_peer[peer]
            raise Refused("busy", f"{len(self._held)} requests are waiting, {mine} of them of this peer")
        self._held[key] = held
        self._per_peer[peer] += 1

    def answered(self, now: float) -> Iterator[tuple[HeldRequest, Answer | Refused]]:
        """Takes out the requests that can be answered now, and those whose time is over."""
        self.retry_at = now + min((held.handler.retry_s for held in self._held.values()), default=0.0)
        in_vain: set[Hashable] = set()
        for held in list(self._held.values()):
            at_once, kind = now >= held.until, (held.handler.answer, held.handler.alike(held.request))
            if kind in in_vain and not at_once:
                continue
            answer: Answer | Refused | None
            try:
                answer = held.handler.answer(held.request, (), at_once)
            except Refused as error:
                answer = error
            if answer is None:
                in_vain.add(kind)
            else:
                self._remove(held)
                yield held, answer

    def _remove(self, held: HeldRequest) -> None:
        del self._held[held.peer, held.request.n]
        self._per_peer[held.peer] -= 1
        if not self._per_peer[held.peer]:
            del self._per_peer[held.peer]
