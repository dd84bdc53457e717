"""An episode played by an agent: it asks, the endpoint records, what it returns is the reward."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from asyncrl.actors.endpoint.delivery import ANSWER_ID, OWN_CLIENT
from asyncrl.actors.endpoint.server import Endpoint
from asyncrl.actors.endpoint.session import Session
from asyncrl.actors.engines.protocol import Engine
from asyncrl.actors.envs.agent import is_async, rewards_of
from asyncrl.actors.episodes.environment_calls import contained
from asyncrl.actors.episodes.episode import EpisodeFailed, Limits, Progress, Result, finished
from asyncrl.actors.rendering.template import Renderer
from asyncrl.data.base import Task
from asyncrl.trajectory import Ticket, Trajectory

API_KEY = "asyncrl"
"""Any text: the URL is the secret."""


@dataclass(frozen=True, slots=True)
class Address:
    """What an agent gets as its client where the openai package is not installed."""

    base_url: str
    api_key: str = API_KEY


class Clients:
    """One pool of connections for all episodes."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: of one request; the episode's own limits end it long before."""
        self._openai = _openai()
        self._async: Any = None
        self._sync: Any = None
        self._responses: dict[str, Any] = {}
        if self._openai is not None:
            for name in ("httpx", "httpx2"):  # a line per request, with the episode's URL, which is its secret
                logging.getLogger(name).setLevel(logging.WARNING)
            options = {"base_url": "http://127.0.0.1/", "api_key": API_KEY, "timeout": timeout_s}
            kinds = _confirming(self._openai, self._responses)
            self._async, self._sync = kinds[0](**options), kinds[1](**options)

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._openai is not None:
            await self._async.close()
            self._sync.close()

    def was_read(self, id: str) -> bool:
        """Whether one of the clients read the whole body of that answer, and its request returned to the agent."""
        response = self._responses.get(id)
        return response is not None and response.num_bytes_downloaded >= int(response.headers["content-length"])

    def forget(self, session: Session) -> None:
        """Let go of what was noted of an episode that has ended."""
        for id in session.transmissions():
            self._responses.pop(id, None)

    def of(self, base_url: str, *, asynchronous: bool) -> Any:
        """An `openai.AsyncOpenAI` (or `openai.OpenAI`), if openai is installed; else an `Address`."""
        if self._openai is None:
            return Address(base_url)
        return (self._async if asynchronous else self._sync).with_options(base_url=base_url)


_REQUEST: ContextVar[list[str] | None] = ContextVar("request", default=None)
"""Ids of the answers that the request under way has begun to read."""


def _confirming(openai: Any, responses: dict[str, Any]) -> tuple[Any, Any]:
    """openai's two clients, which keep in `responses` each answer that begins to arrive, by its id, and let go of those
    whose request raised: it was cancelled, timed out, or asked again."""

    def begun(response: Any) -> None:
        if id := response.headers.get(ANSWER_ID):
            responses[id] = response
            if (request := _REQUEST.get()) is not None:
                request.append(id)

    async def begun_async(response: Any) -> None:
        begun(response)

    def marked(request: Any) -> None:
        request.headers[OWN_CLIENT] = "1"

    async def marked_async(request: Any) -> None:
        marked(request)

    @contextlib.contextmanager
    def request() -> Iterator[None]:
        ids: list[str] = []
        token = _REQUEST.set(ids)
        try:
            yield
        except BaseException:
            for id in ids:
                responses.pop(id, None)
            raise
        finally:
            _REQUEST.reset(token)

    class Async(openai.AsyncOpenAI):  # type: ignore[misc]
        async def request(self, *args: Any, **options: Any) -> Any:
            with request():
                return await super().request(*args, **options)

    class Sync(openai.OpenAI):  # type: ignore[misc]
        def request(self, *args: Any, **options: Any) -> Any:
            with request():
                return super().request(*args, **options)

    def built(kind: Any, on_request: Any, on_response: Any) -> Callable[..., Any]:
        def make(**options: Any) -> Any:
            client = kind(**options)
            client._client.event_hooks = {"request": [on_request], "response": [on_response]}
            return client

        return make

    return built(Async, marked_async, begun_async), built(Sync, marked, begun)


class AgentPlayer:
    """Plays tickets with an agent."""

    def __init__(
        self,
        agent: Callable[[Task, Any], Any],
        endpoint: Endpoint,
        clients: Clients,
        engine: Engine,
        renderer: Renderer,
        limits: Limits,
        *,
        actor: str,
        env_name: str,
    ) -> None:
        self._agent, self._endpoint, self._clients = agent, endpoint, clients
        self._engine, self._renderer, self._limits = engine, renderer, limits
        self._actor, self._env_name = actor, env_name

    async def __call__(self, ticket: Ticket, progress: Progress) -> Trajectory:
        """Raises EpisodeFailed, and what the engine raises.

        An agent that raises after it ran into a limit of the episode has not reached its goal: reward 0. Whatever else
        it raises is a fault of the agent, never a reward.
        """
        start = progress.at
        session = Session(ticket, self._engine, self._renderer, self._limits, progress, self._clients.was_read)
        task = {**ticket.task, "episode": ticket.id.index}
        asynchronous = is_async(self._agent)
        with self._endpoint.open(session) as base_url:
            client = self._clients.of(base_url, asynchronous=asynchronous)
            call = functools.partial(self._agent, task, client)
            started = call if asynchronous else functools.partial(asyncio.to_thread, call)
            playing = asyncio.ensure_future(contained(started))
            try:
                await asyncio.wait([playing, session.broken], return_when=asyncio.FIRST_COMPLETED)
                if session.broken.done():
                    session.broken.result()
                reward, rewards = self._rewards(playing, session)
                for _ in range(2):  # what became of the last connections is read by the loop
                    await asyncio.sleep(0)
                rows, answers = session.received()
            finally:
                playing.cancel()
                self._clients.forget(session)
                await session.calls.close()
                if not session.broken.cancel():
                    session.broken.exception()  # seen, whether or not it was raised
        if not len(rows):
            raise EpisodeFailed("env_error", f"agent {self._env_name} ended without an answer of the policy")
        result = Result(rows.freeze(), reward, rewards, {}, len(answers), session.stop_reason(answers))
        return finished(ticket, result, progress, start, actor=self._actor, env_name=self._env_name)

    def _rewards(self, playing: asyncio.Future[Any], session: Session) -> tuple[float, dict[str, float]]:
        name = f"agent {self._env_name}"
        if playing.cancelled():
            raise EpisodeFailed("env_error", f"{name} cancelled itself")
        error = playing.exception()
        if error is not None and session.limit is None:
            raise EpisodeFailed("env_error", f"{name}: {type(error).__name__}: {error}") from error
        try:
            return rewards_of(playing.result() if error is None else 0.0)
        except TypeError as wrong:
            raise EpisodeFailed("env_error", f"{name}: {wrong}") from wrong


def _openai() -> ModuleType | None:
    try:
        return importlib.import_module("openai")
    except ImportError:
        return None
