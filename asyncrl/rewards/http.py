"""JSON over HTTP to a service that may be busy, limited or unavailable."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import Any

_MOST_BYTES = 64 << 20
_BUSY = (408, 409, 425, 429, 500, 502, 503, 504)


class ServiceFailed(Exception):
    """Names the address, the result of the last attempt, and the number of attempts."""


async def post(
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
    retries: int = 3,
    backoff_s: float = 0.5,
) -> Any:
    """The JSON answer of `url`. Raises ServiceFailed.

    Without an answer, or if it is not JSON or has the status of a busy service, the request is sent again after a
    growing pause, or the one that Retry-After names.
    """
    return await _ask(url, json.dumps(body).encode(), headers, timeout_s, retries, backoff_s)


async def get(url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 30.0, retries: int = 3) -> Any:
    """Like `post`, without a body."""
    return await _ask(url, None, headers, timeout_s, retries, 0.5)


async def _ask(
    url: str,
    data: bytes | None,
    headers: Mapping[str, str] | None,
    timeout_s: float,
    retries: int,
    backoff_s: float,
) -> Any:
    for attempt in range(retries + 1):
        try:
            return await asyncio.to_thread(_answer, url, data, dict(headers or {}), timeout_s)
        except _Refused as refused:
            problem, pause = str(refused), refused.retry_after
            if refused.code not in _BUSY:
                raise ServiceFailed(f"{url} refused: {problem}") from refused
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem, pause = f"{type(error).__name__}: {error}", None
        if attempt < retries:
            await asyncio.sleep(min(pause or backoff_s * 2**attempt * random.uniform(0.5, 1.5), 60.0))
    raise ServiceFailed(f"{url} gave no answer in {retries + 1} attempts: {problem}")


class _Refused(Exception):
    """An answer with the status of an error; says which, and what it says."""

    def __init__(self, error: urllib.error.HTTPError) -> None:
        with error:
            super().__init__(f"{error.code} {error.reason}: {error.read(300).decode(errors='replace')}")
        self.code, self.retry_after = error.code, _retry_after(error.headers.get("Retry-After"))


def _answer(url: str, data: bytes | None, headers: dict[str, str], timeout_s: float) -> Any:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with _Deadline(timeout_s) as deadline:
        try:
            with deadline.opener.open(request, timeout=timeout_s) as answer:
                body = answer.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise _Refused(error) from error
    if len(body) > _MOST_BYTES:
        raise ServiceFailed(f"{url} answered with more than {_MOST_BYTES} bytes")
    return json.loads(body)


class _Deadline:
    """The time for a whole answer: what urllib takes is that of each read. Raises TimeoutError when it was over."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._over = seconds, threading.Event()
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self.opener = urllib.request.build_opener(_Http(self), _Https(self))

    def opened(self, connection: socket.socket) -> None:
        """Takes a connection into account; one that was made when the time was over already is ended."""
        self._sockets.append(connection)
        if self._over.is_set():
            self._end()

    def _end(self) -> None:
        """Wakes the thread that reads."""
        self._over.set()
        for each in list(self._sockets):
            with contextlib.suppress(OSError):  # it is closed already
                socket.socket.shutdown(each, socket.SHUT_RDWR)

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._timer.cancel()
        if self._over.is_set():
            raise TimeoutError(f"no whole answer within {self._seconds:g} s") from error


class _Http(urllib.request.HTTPHandler):
    """Tells a deadline of the sockets that it opens."""

    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> Any:
        deadline = self._deadline

        class Telling(http_class):  # type: ignore[misc]
            def connect(self) -> None:
                super().connect()
                deadline.opened(self.sock)

        return super().do_open(Telling, req, **options)


class _Https(_Http, urllib.request.HTTPSHandler):
    """The same for HTTPS."""


def _retry_after(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:
        return None
