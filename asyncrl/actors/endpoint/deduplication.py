"""Which requests are one: an agent's client asks again when a connection broke, and must not be answered twice.

Two equal requests whose callers both listen are two (best of n); one that takes the place of a caller who is gone, or
says that it is a retry, or carries the same idempotency key, is the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.actors.endpoint.replies import Reply


class Call:
    """One request, however often it is sent."""

    def __init__(self, task: asyncio.Task[Reply]) -> None:
        self.task = task
        self.listeners = 0
        self.delivered = False


class Calls:
    """The requests of one episode."""

    def __init__(self) -> None:
        self._by_body: dict[bytes, list[Call]] = {}
        self._by_key: dict[str, Call] = {}

    def open(
        self, body: bytes, key: str | None, *, retry: bool, work: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> Call:
        """The call that answers this request: one that is known, or a new one that does `work`."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        call = self._by_key.get(key) if key else self._unanswered(digest, retry)
        if call is None:
            call = Call(asyncio.create_task(work()))
            self._by_body.setdefault(digest, []).append(call)
            if key:
                self._by_key[key] = call
        return call

    async def close(self) -> None:
        tasks = [call.task for calls in self._by_body.values() for call in calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _unanswered(self, digest: bytes, retry: bool) -> Call | None:
        # A client's retry may arrive before its broken connection is noticed.
        waiting = [call for call in self._by_body.get(digest, ()) if not call.delivered]
        return next((call for call in waiting if retry or not call.listeners), None)
