"""An endpoint on loopback, with one base URL per episode, for any agent.

    POST /r/EPISODE/v1/chat/completions       tools, n, stop, seed, max_tokens, logprobs, stream
    POST /r/EPISODE/v1/responses              OpenAI's Responses API: tools, previous_response_id, stream
    POST /r/EPISODE/v1/messages               Anthropic's Messages API: tools, stop_sequences, stream
    GET  /r/EPISODE/v1/models
    POST /r/EPISODE/inference/v1/generate     vLLM's token dialect

EPISODE cannot be guessed and is valid while the episode lasts. A request waits while weights are loaded; it never
fails because of that. Errors have the form of the request's protocol.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from asyncrl.actors.endpoint import open_connections
from asyncrl.actors.endpoint.constraints import Constraints, constraints, refused, shown
from asyncrl.actors.endpoint.deduplication import DistinctRequest
from asyncrl.actors.endpoint.delivery import ANSWER_ID, OWN_CLIENT, Connections, Transmission
from asyncrl.actors.endpoint.protocols import CHAT, PROTOCOLS
from asyncrl.actors.endpoint.protocols.protocol import Protocol
from asyncrl.actors.endpoint.replies import Reply, chat_json, tokens_json
from asyncrl.actors.endpoint.requests import BadRequest, ChatBody, plain, read_tokens
from asyncrl.actors.endpoint.session import Session
from asyncrl.actors.engines.protocol import EngineDied
from asyncrl.actors.episodes.environment_calls import EpisodeFailed

log = logging.getLogger(__name__)


HOST = "127.0.0.1"
MAX_BODY_BYTES = 8 << 20
START_S = 10.0
IDLE_S = 120
"""Longer than clients keep an idle connection (openai 5 s, Go 90 s), so that the server never closes a connection that
a client is about to use. Agents that create a client per episode leave one connection behind with each."""
GONE = 499
"""Status for a caller that is gone and reads none."""


class EndpointServer:
    """Serves while the context is open."""

    def __init__(self, model: str, max_tokens: int, constraints: Constraints = "refuse") -> None:
        """`model`: the id that `/v1/models` returns. `max_tokens`: the limit of one row. `constraints`: what happens to
        fields that constrain sampling."""
        self.app = Starlette(
            routes=[
                *[
                    Route(f"/r/{{episode}}{path}", functools.partial(self._messages, protocol), methods=["POST"])
                    for protocol in PROTOCOLS
                    for path in protocol.paths
                ],
                Route("/r/{episode}/v1/models", self._models, methods=["GET"]),
                Route("/r/{episode}/inference/v1/generate", self._tokens, methods=["POST"]),
            ],
            exception_handlers={
                BadRequest: _bad_request,
                HTTPException: _http_error,
                ClientDisconnect: _left,
                Exception: _failed,
            },
        )
        self._model, self._max_tokens, self._constraints = model, max_tokens, constraints
        self._sessions: dict[str, Session] = {}
        self._said: set[str] = set()
        self._connections = Connections()
        self._socket = socket.socket()
        self._server = _UvicornServer(
            uvicorn.Config(
                self.app, http=open_connections.limited(self._connections), ws="none", lifespan="off",
                log_level="warning", access_log=False, proxy_headers=False, timeout_keep_alive=IDLE_S,
                backlog=open_connections.ACCEPTED_AT_ONCE,
                h11_max_incomplete_event_size=open_connections.MAX_HEAD_BYTES,
            )
        )  # fmt: skip
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EndpointServer:
        self._socket.bind((HOST, 0))
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="endpoint")
        async with asyncio.timeout(START_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                await asyncio.sleep(0.005)
        # uvicorn's backlog is also how many connections asyncio takes at once, and so it is small.
        self._socket.listen(open_connections.WAITING)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=START_S)
        self._socket.close()

    @contextmanager
    def open(self, session: Session) -> Iterator[str]:
        """The base URL of an episode, valid while the context is open."""
        episode = secrets.token_urlsafe(24)
        self._sessions[episode] = session
        try:
            yield f"http://{HOST}:{self._socket.getsockname()[1]}/r/{episode}/v1"
        finally:
            del self._sessions[episode]

    # The routes.

    async def _messages(self, protocol: Protocol, request: Request) -> Response:
        session = self._session(request)
        raw = await _body(request)
        asked = protocol.read(raw, session.histories)
        self._check_sampling(protocol, asked.chat, session)
        distinct = await self._finished(request, session, raw, lambda: session.chat(asked.chat))
        if distinct is None:
            return Response(status_code=GONE)
        reply = session.deliver(distinct, asked.chat)
        completion = chat_json(asked.chat, self._head(distinct, asked.chat, reply), reply, session.renderer.decode)
        answer = protocol.answer(asked, completion)
        if asked.history:
            session.histories[answer["id"]] = [*asked.history, plain(reply.choices[0].message)]
        if asked.chat.stream:
            events = Response(protocol.events(asked, answer), media_type="text/event-stream")
            return self._tracked(request, distinct, events)
        return self._tracked(request, distinct, _json(answer))

    async def _tokens(self, request: Request) -> Response:
        session = self._session(request)
        raw = await _body(request)
        body = read_tokens(raw, session.renderer.vocabulary)
        distinct = await self._finished(request, session, raw, lambda: session.tokens(body))
        if distinct is None:
            return Response(status_code=GONE)
        return self._tracked(request, distinct, _json(tokens_json(body, session.deliver(distinct, body))))

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

    async def _finished(
        self, request: Request, session: Session, raw: bytes, work: Callable[[], Coroutine[Any, Any, Reply]]
    ) -> DistinctRequest | None:
        """The request, once it is done; None if its caller is gone before."""
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        path = request.url.path.rpartition("/")[2].encode()
        distinct = session.requests.open(path + raw, request.headers.get("idempotency-key"), retry=retry, work=work)
        gone = asyncio.create_task(_gone(request))
        distinct.callers += 1
        try:
            await asyncio.wait([distinct.task, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            distinct.callers -= 1
            gone.cancel()
        if not distinct.task.done():
            return None
        if distinct.task.cancelled():
            raise BadRequest("the episode is over", code="unknown_episode", status=404)
        if isinstance(error := distinct.task.exception(), EngineDied | EpisodeFailed):
            raise BadRequest(f"the actor gives up this episode: {error}", code="given_up", status=503)
        return distinct

    def _tracked(self, request: Request, distinct: DistinctRequest, response: Response) -> Response:
        """`response`, with its transmission tracked: delivery.py says when it counts as received."""
        transmission = Transmission(secrets.token_hex(8), OWN_CLIENT in request.headers)
        distinct.transmissions.append(transmission)
        if request.client is not None:
            self._connections.sending((request.client.host, request.client.port), transmission)
        response.headers[ANSWER_ID] = transmission.id

        async def handed() -> None:
            transmission.handed = not transmission.closed

        response.background = BackgroundTask(handed)
        return response

    def _head(self, request: DistinctRequest, body: ChatBody, reply: Reply) -> dict[str, Any]:
        version = max((int(choice.generation.versions.max(initial=0)) for choice in reply.choices), default=0)
        return {
            "id": f"chatcmpl-{id(request):x}",
            "created": int(time.time()),
            "model": body.model or self._model,
            "system_fingerprint": f"policy-version-{version}",
        }

    def _check_sampling(self, protocol: Protocol, chat: ChatBody, session: Session) -> None:
        """Says once which fields that ask for other sampling have no effect. Raises BadRequest for those refused."""
        for name in chat.overruled(session.temperature, session.limits.top_p):
            self._warn_once(name, f"overruled, the run samples with actors.{name}", getattr(chat, name))
        for field, value in constraints(chat).items():
            name = protocol.names.get(field, field)
            if self._constraints == "refuse":
                raise refused(name, value)
            self._warn_once(name, "ignored, as actors.constraints says; the policy samples freely", shown(value))

    def _warn_once(self, name: str, what: str, value: object) -> None:
        if name not in self._said:
            self._said.add(name)
            log.warning("an agent asks for %s %s: %s (this warning comes once)", name, value, what)


class _UvicornServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the actor handles signals


async def _body(request: Request) -> bytes:
    """Raises BadRequest past the limits of size (413) and time (408)."""
    body, seconds = bytearray(), open_connections.BODY_S
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise BadRequest(f"the request has more than {MAX_BODY_BYTES} bytes", code="too_large", status=413)
    except TimeoutError:
        raise BadRequest(f"the body did not arrive within {seconds:g} s", code="too_slow", status=408) from None
    return bytes(body)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(content: dict[str, Any], status: int = 200) -> Response:
    # Not starlette's JSONResponse: the policy's text may hold half a surrogate pair, which is not UTF-8.
    return Response(json.dumps(content), status, media_type="application/json")


def _error(request: Request, status: int, message: str, param: str | None = None, code: str | None = None) -> Response:
    """An error in the form of the request's protocol; OpenAI's for other paths."""
    spoken = (protocol for protocol in PROTOCOLS if request.url.path.endswith(protocol.paths))
    protocol = next(spoken, CHAT)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _json(protocol.error(message, kind, protocol.names.get(param or "", param), code), status)


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return _error(request, error.status, str(error), error.param, error.code)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path.rpartition('/')[2]}: {error.detail}"
    return _error(request, error.status_code, text, code="unknown_route")


async def _left(request: Request, error: Exception) -> Response:
    """Of its own, since the one for Exception says a traceback too."""
    return Response(status_code=GONE)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(request, 500, f"{type(error).__name__}: {error}")
