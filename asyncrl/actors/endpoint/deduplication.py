"""Recognises repeated requests: a client asks again when its connection broke, and must not be answered twice.

Two equal requests whose callers both wait are two (best of n). A request is a repetition if the earlier caller is gone,
if it is marked as a retry, or if it carries the same idempotency key.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.actors.endpoint.replies import Reply


class DistinctRequest:
    """One request, however often it is sent."""

    def __init__(self, task: asyncio.Task[Reply]) -> None:
        self.task = task
        self.callers = 0
        self.delivered = False


class DistinctRequests:
    """The requests of one episode."""

    def __init__(self) -> None:
        self._by_body: dict[bytes, list[DistinctRequest]] = {}
        self._by_key: dict[str, DistinctRequest] = {}

    def open(
        self, body: bytes, key: str | None, *, retry: bool, work: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> DistinctRequest:
        """The request that has this body: an earlier one, or a new one that does `work`."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        request = self._by_key.get(key) if key else self._unanswered(digest, retry)
        if request is None:
            request = DistinctRequest(asyncio.create_task(work()))
            self._by_body.setdefault(digest, []).append(request)
            if key:
                self._by_key[key] = request
        return request

    async def close(self) -> None:
        tasks = [request.task for requests in self._by_body.values() for request in requests]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _unanswered(self, digest: bytes, retry: bool) -> DistinctRequest | None:
        # A client's retry may arrive before its broken connection is noticed.
        waiting = [request for request in self._by_body.get(digest, ()) if not request.delivered]
        return next((request for request in waiting if retry or not request.callers), None)
