"""An OpenAI-compatible endpoint on loopback, one base URL per episode: any agent can play.

    POST /r/EPISODE/v1/chat/completions       tools, n, stop, seed, max_tokens, logprobs, stream
    GET  /r/EPISODE/v1/models
    POST /r/EPISODE/inference/v1/generate     vLLM's token dialect

EPISODE cannot be guessed and is good as long as the episode lasts. While weights are swapped a request waits; it never
fails for that. Errors have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from asyncrl.actors.endpoint.deduplication import Call
from asyncrl.actors.endpoint.delivery import ANSWER_ID, OWN_CLIENT, Connections, Transmission
from asyncrl.actors.endpoint.replies import Reply, chat_events, chat_json, error_json, tokens_json
from asyncrl.actors.endpoint.requests import BadRequest, ChatBody, TokenBody, read_chat, read_tokens
from asyncrl.actors.endpoint.session import Session
from asyncrl.actors.engines.protocol import EngineDied
from asyncrl.actors.episodes.episode import EpisodeFailed

log = logging.getLogger(__name__)
B = TypeVar("B", ChatBody, TokenBody)

HOST = "127.0.0.1"
MAX_BODY_BYTES = 8 << 20
START_S = 10.0
IDLE_S = 120
"""Longer than clients keep an idle connection (openai 5 s, Go 90 s), so that it is never the server that closes one
under them; agents that make a client per episode leave one behind with each."""
GONE = 499
"""The caller is gone: nobody reads this status."""


class Endpoint:
    """Serves while the context is open."""

    def __init__(self, model: str, max_tokens: int) -> None:
        """`model`: the id that `/v1/models` tells; `max_tokens`: of one row."""
        self.app = Starlette(
            routes=[
                Route("/r/{episode}/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/r/{episode}/v1/models", self._models, methods=["GET"]),
                Route("/r/{episode}/inference/v1/generate", self._tokens, methods=["POST"]),
            ],
            exception_handlers={BadRequest: _bad_request, HTTPException: _http_error, Exception: _failed},
        )
        self._model, self._max_tokens = model, max_tokens
        self._sessions: dict[str, Session] = {}
        self._overruled: set[str] = set()
        self._connections = Connections()
        self._socket = socket.socket()
        self._server = _Server(
            uvicorn.Config(
                self.app, http=_watched(self._connections), ws="none", lifespan="off", log_level="warning",
                access_log=False, proxy_headers=False,
                timeout_keep_alive=IDLE_S,
            )
        )  # fmt: skip
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Endpoint:
        self._socket.bind((HOST, 0))
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="endpoint")
        async with asyncio.timeout(START_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=START_S)
        self._socket.close()

    @contextmanager
    def open(self, session: Session) -> Iterator[str]:
        """The base URL of an episode, as long as the context is open."""
        episode = secrets.token_urlsafe(24)
        self._sessions[episode] = session
        try:
            yield f"http://{HOST}:{self._socket.getsockname()[1]}/r/{episode}/v1"
        finally:
            del self._sessions[episode]

    # The routes.

    async def _chat(self, request: Request) -> Response:
        session = self._session(request)
        raw = await _body(request)
        body = read_chat(raw)
        for name in body.overruled(session.temperature, session.limits.top_p):
            self._tell(name, getattr(body, name))
        call = await self._answered(request, session, raw, lambda: session.chat(body))
        if call is None:
            return Response(status_code=GONE)
        reply = session.deliver(call, body)
        completion = chat_json(body, self._head(call, body, reply), reply, session.renderer.decode)
        if body.stream:
            return self._sent(request, call, Response(chat_events(body, completion), media_type="text/event-stream"))
        return self._sent(request, call, _json(completion))

    async def _tokens(self, request: Request) -> Response:
        session = self._session(request)
        raw = await _body(request)
        body = read_tokens(raw, session.renderer.vocabulary)
        call = await self._answered(request, session, raw, lambda: session.tokens(body))
        if call is None:
            return Response(status_code=GONE)
        return self._sent(request, call, _json(tokens_json(body, session.deliver(call, body))))

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "asyncrl"}
        return _json({"object": "list", "data": [model | {"max_model_len": self._max_tokens}]})

    def _session(self, request: Request) -> Session:
        if request.client is not None:
            self._connections.request((request.client.host, request.client.port))
        try:
            return self._sessions[request.path_params["episode"]]
        except KeyError:
            raise BadRequest("no such episode, or it is over", code="unknown_episode", status=404) from None

    async def _answered(
        self, request: Request, session: Session, raw: bytes, work: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> Call | None:
        """The call of this request, done; None when its caller is gone before that."""
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        path = request.url.path.rpartition("/")[2].encode()
        call = session.calls.open(path + raw, request.headers.get("idempotency-key"), retry=retry, work=work)
        gone = asyncio.create_task(_gone(request))
        call.listeners += 1
        try:
            await asyncio.wait([call.task, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.listeners -= 1
            gone.cancel()
        if not call.task.done():
            return None
        if call.task.cancelled():
            raise BadRequest("the episode is over", code="unknown_episode", status=404)
        if isinstance(error := call.task.exception(), EngineDied | EpisodeFailed):
            raise BadRequest(f"the actor gives this episode up: {error}", code="given_up", status=503)
        return call

    def _sent(self, request: Request, call: Call, response: Response) -> Response:
        """`response`, whose fate is noted: delivery.py says when it counts as received."""
        transmission = Transmission(secrets.token_hex(8), OWN_CLIENT in request.headers)
        call.transmissions.append(transmission)
        if request.client is not None:
            self._connections.sending((request.client.host, request.client.port), transmission)
        response.headers[ANSWER_ID] = transmission.id

        async def handed() -> None:
            transmission.handed = not transmission.closed

        response.background = BackgroundTask(handed)
        return response

    def _head(self, call: Call, body: ChatBody, reply: Reply) -> dict[str, Any]:
        version = max((int(a.generation.versions.max(initial=0)) for a in reply.answers), default=0)
        return {
            "id": f"chatcmpl-{id(call):x}",
            "created": int(time.time()),
            "model": body.model or self._model,
            "system_fingerprint": f"policy-version-{version}",
        }

    def _tell(self, name: str, value: object) -> None:
        if name not in self._overruled:
            self._overruled.add(name)
            log.warning(
                "an agent asks for %s %s: overruled, the run samples as actors.%s says (said once)", name, value, name
            )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the actor's


def _watched(connections: Connections) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which tells `connections` what becomes of each."""

    class Watched(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if self.client is not None:
                connections.opened(self.client, transport)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.client is not None:
                connections.closed(self.client, exc)

    return Watched


async def _body(request: Request) -> bytes:
    """Raises BadRequest (413) past the limit."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BadRequest(f"the request has more than {MAX_BODY_BYTES} bytes", code="too_large", status=413)
    return bytes(body)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(content: dict[str, Any], status: int = 200) -> Response:
    # Not starlette's JSONResponse: what a policy says may hold half a surrogate pair, which is no UTF-8.
    return Response(json.dumps(content), status, media_type="application/json")


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return _json(error_json(str(error), kind, error.param, error.code), error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path.rpartition('/')[2]}: {error.detail}"
    return _json(error_json(text, "invalid_request_error", code="unknown_route"), error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    return _json(error_json(f"{type(error).__name__}: {error}", "server_error"), 500)
