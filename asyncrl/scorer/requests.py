"""One request to a server of the teacher: its deadline, its size, and what the answer's status says of whom.

200                        the answer
500                        ServerErred: an error of its own, at this request or at any
502, 503, 504, 408, 429,   TeacherSilent: an outage, it may answer later; so do a refused connection and a deadline
404 later on
any other                  TeacherUnusable: it refuses, and would refuse again
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import httpx

from asyncrl.scorer.dialects import TeacherUnusable

_UNLIMITED = httpx.Limits()
"""`learner.teacher.score_slots` bounds the connections."""
MOST_BYTES = 16 << 20
"""Most bytes of an answer, beside what its words take."""
SLOW_S = 10.0
"""A request that is unanswered for so long is told of."""
CLOSE_S = 5.0
"""Until a request that was told to end has ended."""
ABOUT_SHARE = 0.25
"""Of `server_s`: until a server has named its model, for which it computes nothing."""


class TeacherSilent(Exception):
    """A server does not answer, or none does; says why."""


class ServerErred(TeacherSilent):
    """A server answered with an error of its own. If it answers its probe then, the error is the request's."""


class Requests:
    """Any thread may ask. All requests are made in one event loop, which alone can end one that waits anywhere: for a
    name, a connection, the answer's head or its body."""

    def __init__(self, server_s: float) -> None:
        """`server_s`: until an answer is whole."""
        self._server_s = server_s
        self._http = httpx.AsyncClient(timeout=None, trust_env=False, limits=_UNLIMITED)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="requests", daemon=True).start()
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._open: dict[int, tuple[str, float]] = {}
        """(URL, since when) of each request without a whole answer."""

    def close(self) -> None:
        """Ends the requests in work, whose threads raise TeacherSilent."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def unanswered(self, now: float, url: str = "") -> str:
        """Which server, that at `url` or any, has been asked for longest, and for how long; empty: for less than
        SLOW_S. The words change with each SLOW_S."""
        with self._lock:
            asked = [(since, at) for at, since in self._open.values() if not url or at.startswith(f"{url}/")]
        since, at = min(asked, default=(now, ""))
        if (times := int((now - since) / SLOW_S)) < 1:
            return ""
        return (
            f"{at} has not answered what it was asked more than {times * SLOW_S:g} s ago, "
            f"learner.teacher.server_s is {self._server_s:g}"
        )

    def get(self, url: str, *, known: bool) -> Any:
        """`known`: a server there has answered before, so that 404 is an outage."""
        return self._answer(url, None, MOST_BYTES, ("a request", "Name another in learner.teacher.servers"), known)

    def post(self, url: str, body: Any, most: int, what: str, remedy: str) -> Any:
        """`most`: bytes of the longest answer. `what` is asked, with the remedy where it is refused."""
        return self._answer(url, body, most, (what, remedy), True)

    def _answer(self, url: str, body: Any, most: int, asked: tuple[str, str], known: bool) -> Any:
        """Raises TeacherSilent for a server that may answer later, TeacherUnusable for one that refuses."""
        try:
            status, content = self._fetched(url, body, most)
        except httpx.HTTPError as error:
            raise TeacherSilent(f"{type(error).__name__} {error}".strip()) from error
        text = content[:500].decode(errors="replace")
        if status == 404 and not known:
            raise TeacherUnusable(
                f"{url} answered 404: {text[:200]}. Name the URL of a vLLM or SGLang server in "
                "learner.teacher.servers, without a path."
            )
        path = httpx.URL(url).path
        if status == 500:
            raise ServerErred(f"{path} answered 500: {text[:200]}")
        if status > 500 or status in (404, 408, 429):
            raise TeacherSilent(f"{path} answered {status}: {text[:200]}")
        if status != 200:
            raise TeacherUnusable(f"{url} refused {asked[0]}: {status} {text}. {asked[1]}.")
        try:
            return json.loads(content)
        except ValueError as error:
            raise TeacherUnusable(
                f"{url} answered {text[:200]!r}, which is no JSON: name the URL of a vLLM or SGLang server in "
                "learner.teacher.servers."
            ) from error

    def _fetched(self, url: str, body: Any, most: int) -> tuple[int, bytes]:
        """(status, content). Raises TeacherSilent, TeacherUnusable, httpx.HTTPError."""
        within_s = self._server_s * (ABOUT_SHARE if body is None else 1.0)
        with self._noted(url):
            asked = asyncio.run_coroutine_threadsafe(self._within(within_s, url, body, most), self._loop)
            try:
                return asked.result(within_s + CLOSE_S)
            except (TimeoutError, CancelledError) as error:
                raise TeacherSilent("the scorer ends") from error

    async def _within(self, within_s: float, url: str, body: Any, most: int) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(within_s):
                return await self._exchanged(url, body, most)
        except TimeoutError as error:
            raise TeacherSilent(f"its answer was not whole after {within_s:g} s") from error

    async def _exchanged(self, url: str, body: Any, most: int) -> tuple[int, bytes]:
        content = bytearray()
        async with self._http.stream("GET" if body is None else "POST", url, json=body) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > most:
                    raise TeacherUnusable(
                        f"{url} answered with more than {most} bytes, expected a few hundred for each word of each "
                        "token: name the URL of a vLLM or SGLang server in learner.teacher.servers."
                    )
        return response.status_code, bytes(content)

    async def _end(self) -> None:
        """Cancels every request in work, and closes the connections."""
        in_work = asyncio.all_tasks() - {asyncio.current_task()}
        for task in in_work:
            task.cancel()
        await asyncio.gather(*in_work, return_exceptions=True)
        await self._http.aclose()

    @contextlib.contextmanager
    def _noted(self, url: str) -> Iterator[None]:
        number = next(self._numbers)
        with self._lock:
            self._open[number] = url, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._open[number]
