"""Which requests are one: an agent's client asks again when a connection broke, and must not be answered twice.

Two equal requests whose callers both listen are two (best of n). A request that takes the place of a caller who is gone
or whose answer was lost, that says it is a retry, or that carries the same idempotency key, is the same request.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asyncrl.actors.endpoint.delivery import Transmission, WasRead
from asyncrl.actors.endpoint.replies import Reply


class Call:
    """One request, however often it is sent."""

    def __init__(self, task: asyncio.Task[Reply], was_read: WasRead) -> None:
        self.task = task
        self.listeners = 0
        self.contained = False
        """A later request of the agent contains the answer."""
        self.transmissions: list[Transmission] = []
        self._was_read = was_read

    @property
    def received(self) -> bool:
        """The agent has the answer, as far as can be known."""
        return self.contained or any(t.received(self._was_read) for t in self.transmissions)

    @property
    def certainly_received(self) -> bool:
        return self.contained or any(t.certainly_received(self._was_read) for t in self.transmissions)

    @property
    def certainly_lost(self) -> bool:
        """It was answered, and no answer arrived."""
        return bool(self.transmissions) and all(t.certainly_lost(self._was_read) for t in self.transmissions)


class Calls:
    """The requests of one episode."""

    def __init__(self, was_read: WasRead) -> None:
        self._was_read = was_read
        self._by_body: dict[bytes, list[Call]] = {}
        self._by_key: dict[str, Call] = {}

    def open(
        self, body: bytes, key: str | None, *, retry: bool, work: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> Call:
        """The call that answers this request: one that is known, or a new one that does `work`."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        call = self._by_key.get(key) if key else None
        if call is None:
            call = self._repeated(self._by_body.get(digest, ()), retry)
        if call is None:
            call = Call(asyncio.create_task(work()), self._was_read)
            self._by_body.setdefault(digest, []).append(call)
        if key:
            self._by_key[key] = call
        return call

    async def close(self) -> None:
        tasks = [call.task for calls in self._by_body.values() for call in calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _repeated(self, equal: Sequence[Call], retry: bool) -> Call | None:
        """The one of `equal` requests that this one repeats."""
        for call in equal:
            # A client's retry may arrive before its broken connection is noticed.
            if not call.transmissions and (retry or not call.listeners):
                return call
        answered = [call for call in equal if call.transmissions]
        lost = [call for call in answered if call.certainly_lost and not call.contained]
        if retry and not lost:
            lost = [call for call in answered if not call.certainly_received]
        return lost[-1] if lost else None
