"""HTTP to several servers of one kind: commands to all of them, and checks whether they serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from asyncrl.actors.engines.protocol import EngineDied

Command = Callable[[int], tuple[str, Any]]
"""(path, body) for the i-th server. The path is relative to the server's URL, the body is JSON."""

KEEP_ALIVE_S = 2.0
"""Shorter than servers keep an idle connection (uvicorn: 5 s), so that none closes a connection about to be used."""


@dataclass(slots=True)
class Server:
    url: str
    running: int = 0
    """Running requests."""


class Servers:
    def __init__(self, urls: Sequence[str], call_s: float, idle_s: float, refused: Callable[[Any], str]) -> None:
        """
        Args:
            call_s: deadline of a command, in seconds.
            idle_s: seconds without a token after which a request's server counts as dead.
            refused: returns why a command that was answered did not succeed; empty if it did.
        """
        self.all = [Server(url.rstrip("/")) for url in urls]
        self._call_s, self._idle_s, self._refused = call_s, idle_s, refused
        self._http: httpx.AsyncClient | None = None

    @property
    def count(self) -> int:
        return len(self.all)

    def open(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
        timeout = httpx.Timeout(self._call_s, read=self._idle_s)
        self._http = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    @property
    def client(self) -> httpx.AsyncClient:
        """Raises EngineDied before `open` and after `close`."""
        if self._http is None:
            raise EngineDied("the engine is not running: it was closed, or never started")
        return self._http

    def least_busy(self) -> Server:
        return min(self.all, key=lambda server: server.running)

    async def command(self, command: Command) -> None:
        """Send a command to all servers at once. Raises EngineDied unless it succeeds on all of them."""
        posts: list[Awaitable[None]] = [self.post(server, *command(i)) for i, server in enumerate(self.all)]
        await asyncio.gather(*posts)

    async def post(self, server: Server, path: str, body: Any) -> None:
        try:
            response = await self.client.post(server.url + path, json=body, timeout=self._call_s)
        except httpx.HTTPError as error:
            raise EngineDied(f"{server.url}{path} did not answer: {type(error).__name__} {error}") from error
        try:
            reply = response.json() if response.content else {}
        except ValueError:
            reply = {"text": response.text}
        if response.status_code != 200:
            raise EngineDied(f"{server.url}{path}: answered {response.status_code}: {str(reply)[:500]}")
        if why := self._refused(reply):
            raise EngineDied(f"{server.url}{path}: {why}")

    async def until_they_serve(self, health: str, within_s: float, ended: Callable[[], str]) -> None:
        """Wait until all servers serve. Raises EngineDied at the deadline, or when `ended` says why they never will."""
        deadline = time.monotonic() + within_s
        for server in self.all:
            while why := await self._why_not(server, health):
                if reason := ended():
                    raise EngineDied(reason)
                if time.monotonic() > deadline:
                    raise EngineDied(f"{server.url} did not serve within {within_s:g} s (launch.start_s): {why}")
                await asyncio.sleep(0.25)

    async def _why_not(self, server: Server, health: str) -> str:
        try:
            response = await self.client.get(server.url + health, timeout=5.0)
        except httpx.HTTPError as error:
            return f"{type(error).__name__} {error}"
        return "" if response.status_code == 200 else f"it answers {response.status_code}"
