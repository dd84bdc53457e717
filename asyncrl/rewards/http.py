"""JSON over HTTP to a service that may be busy, limited or unavailable."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import urllib.error
import urllib.request
from collections.abc import Mapping
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
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.reason}: {error.read(300).decode(errors='replace')}"
            if error.code not in _BUSY:
                raise ServiceFailed(f"{url} refused: {problem}") from error
            pause = _retry_after(error.headers.get("Retry-After"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem, pause = f"{type(error).__name__}: {error}", None
        if attempt < retries:
            await asyncio.sleep(min(pause or backoff_s * 2**attempt * random.uniform(0.5, 1.5), 60.0))
    raise ServiceFailed(f"{url} gave no answer in {retries + 1} attempts: {problem}")


def _answer(url: str, data: bytes | None, headers: dict[str, str], timeout_s: float) -> Any:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        body = answer.read(_MOST_BYTES + 1)
    if len(body) > _MOST_BYTES:
        raise ServiceFailed(f"{url} answered with more than {_MOST_BYTES} bytes")
    return json.loads(body)


def _retry_after(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:
        return None
