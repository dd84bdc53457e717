"""Recognises repeated requests: a client repeats one whose connection broke, and must get the same reply.

Equal requests whose callers all wait are separate (best of n). A request is a repetition if the earlier caller is gone
or its reply was lost, if it is marked as a retry, or if it carries the same idempotency key.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asyncrl.actors.endpoint.delivery import Transmission, WasRead
from asyncrl.actors.endpoint.replies import Reply


class DistinctRequest:
    """One request, however often it is sent."""

    def __init__(self, task: asyncio.Task[Reply], was_read: WasRead) -> None:
        self.task = task
        self.callers = 0
        self.contained = False
        """A later request of the agent contains the reply."""
        self.transmissions: list[Transmission] = []
        self._was_read = was_read

    @property
    def received(self) -> bool:
        """Whether the agent has the reply, as far as the evidence goes."""
        return self.contained or any(t.received(self._was_read) for t in self.transmissions)

    @property
    def certainly_received(self) -> bool:
        return self.contained or any(t.certainly_received(self._was_read) for t in self.transmissions)

    @property
    def certainly_lost(self) -> bool:
        """Whether replies were sent and none arrived."""
        return bool(self.transmissions) and all(t.certainly_lost(self._was_read) for t in self.transmissions)


class DistinctRequests:
    """The requests of one episode."""

    def __init__(self, was_read: WasRead) -> None:
        self._was_read = was_read
        self._by_body: dict[bytes, list[DistinctRequest]] = {}
        self._by_key: dict[str, DistinctRequest] = {}

    def open(
        self, body: bytes, key: str | None, *, retry: bool, work: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> DistinctRequest:
        """The request that has this body: an earlier one, or a new one that does `work`."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        request = self._by_key.get(key) if key else None
        if request is None:
            request = _repeated(self._by_body.get(digest, ()), retry)
        if request is None:
            request = DistinctRequest(asyncio.create_task(work()), self._was_read)
            self._by_body.setdefault(digest, []).append(request)
        if key:
            self._by_key[key] = request
        return request

    async def close(self) -> None:
        tasks = [request.task for requests in self._by_body.values() for request in requests]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _repeated(equal: Sequence[DistinctRequest], retry: bool) -> DistinctRequest | None:
    """The one of `equal` requests that a new one repeats."""
    # A client's retry may arrive before its broken connection is noticed.
    unanswered = (request for request in equal if not request.transmissions and (retry or not request.callers))
    return next(unanswered, None) or _lost([request for request in equal if request.transmissions], retry)


def _lost(answered: Sequence[DistinctRequest], retry: bool) -> DistinctRequest | None:
    """The last request whose reply was lost; for a retry, if there is none, the last whose reply may have been lost."""
    lost = [request for request in answered if request.certainly_lost and not request.contained]
    if retry and not lost:
        lost = [request for request in answered if not request.certainly_received]
    return lost[-1] if lost else None
