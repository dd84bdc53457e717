"""The openai clients given to agents: they share connections, and note which replies they have read."""

from __future__ import annotations

import contextlib
import importlib
import logging
import ssl
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from asyncrl.actors.endpoint.delivery import ANSWER_ID, OWN_CLIENT

API_KEY = "asyncrl"
"""Any text, since the URL is the secret."""


@dataclass(frozen=True, slots=True)
class Address:
    """The client that an agent gets where the openai package is not installed."""

    base_url: str
    api_key: str = API_KEY

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"client.{name}: the openai package is not installed, so the client has a base_url and an api_key only. "
            "pip install openai, or give these two to the client of another SDK"
        )


class Clients:
    """Clients of all episodes."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: deadline of one request, far beyond the limits of the episode."""
        self.receipts = Receipts()
        self._openai = _openai()
        self._async: Any = None
        self._sync: Any = None
        if self._openai is not None:
            for name in ("httpx", "httpx2"):  # they log every URL, which is the episode's secret
                logging.getLogger(name).setLevel(logging.WARNING)
            options = {"base_url": "http://127.0.0.1/", "api_key": API_KEY, "timeout": timeout_s}
            self._async, self._sync = _noting(self._openai, self.receipts, options)

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._openai is not None:
            await self._async.close()
            self._sync.close()

    def of(self, base_url: str, *, asynchronous: bool) -> Any:
        """An `openai.AsyncOpenAI` (or `openai.OpenAI`), if openai is installed; else an `Address`."""
        if self._openai is None:
            return Address(base_url)
        return (self._async if asynchronous else self._sync).with_options(base_url=base_url)


_REQUEST: ContextVar[list[str] | None] = ContextVar("request", default=None)
"""Ids of the replies that the current request has begun to read."""


class Receipts:
    """The replies that began to arrive, by id, without those whose request was cancelled, timed out, or lost its
    connection. A reply that the client read and could not parse (`.parse(Model)`) was received: its agent reacts to it.
    """

    def __init__(self) -> None:
        self._responses: dict[str, Any] = {}

    def was_read(self, id: str) -> bool:
        """Whether a client read the whole reply of this id, and its request returned to the agent."""
        response = self._responses.get(id)
        return response is not None and response.num_bytes_downloaded >= int(response.headers["content-length"])

    def forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._responses.pop(id, None)

    @contextlib.contextmanager
    def request(self, connection_error: type[Exception]) -> Iterator[None]:
        """One request of an agent, all its attempts included. `connection_error`: what the client raises if no reply
        arrived."""
        ids: list[str] = []
        token = _REQUEST.set(ids)
        try:
            yield
        except BaseException as error:
            if isinstance(error, connection_error) or not isinstance(error, Exception):  # CancelledError
                self.forget(ids)
            raise
        finally:
            _REQUEST.reset(token)

    def begun(self, response: Any) -> None:
        if id := response.headers.get(ANSWER_ID):
            self._responses[id] = response
            if (request := _REQUEST.get()) is not None:
                request.append(id)

    async def begun_async(self, response: Any) -> None:
        self.begun(response)


def _mark(request: Any) -> None:
    request.headers[OWN_CLIENT] = "1"


async def _mark_async(request: Any) -> None:
    _mark(request)


def _noting(openai: Any, receipts: Receipts, options: dict[str, Any]) -> tuple[Any, Any]:
    """openai's two clients, which note in `receipts` what they read."""

    class Async(openai.AsyncOpenAI):  # type: ignore[misc]
        async def request(self, *args: Any, **options: Any) -> Any:
            with receipts.request(openai.APIConnectionError):
                return await super().request(*args, **options)

    class Sync(openai.OpenAI):  # type: ignore[misc]
        def request(self, *args: Any, **options: Any) -> Any:
            with receipts.request(openai.APIConnectionError):
                return super().request(*args, **options)

    # The endpoint speaks plain HTTP: a context that trusts nobody, since reading the system's certificates takes 50 ms.
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asynchronous = Async(**options, http_client=openai.DefaultAsyncHttpxClient(verify=nobody))
    synchronous = Sync(**options, http_client=openai.DefaultHttpxClient(verify=nobody))
    asynchronous._client.event_hooks = {"request": [_mark_async], "response": [receipts.begun_async]}
    synchronous._client.event_hooks = {"request": [_mark], "response": [receipts.begun]}
    return asynchronous, synchronous


def _openai() -> ModuleType | None:
    try:
        return importlib.import_module("openai")
    except ImportError:
        return None
