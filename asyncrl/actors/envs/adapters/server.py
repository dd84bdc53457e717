"""A server for environments: a running one, or one that the actor starts and ends.

    {url: http://host:port}                                      a running server
    {command: [program, argument, ...], env: {NAME: value}}      `{python}`: asyncrl's Python; `{port}`: a free port

A started server serves all of the actor's episodes. When it ends, these fail, and the next episode starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import ssl
import sys
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from asyncrl.actors.engines.servers.process import ServerProcess, free_port

LOOK_S = 0.2
"""Seconds between two checks that it serves, and still runs."""


def check_server(server: Any, packages: tuple[str, ...], extra: str) -> None:
    """Raises ValueError for an invalid `server`, and for a missing package among `packages`."""
    given = set(server) if isinstance(server, Mapping) else set()
    if given != {"url"} and not {"command"} <= given <= {"command", "env"}:
        raise ValueError(
            f"env.options.server is {server!r}; expected {{url: http://...}} or {{command: [program, ...], env}}"
        )
    if "url" in given and not str(server["url"]).startswith(("http://", "https://")):
        raise ValueError(f"env.options.server.url is {server['url']!r}; expected http:// or https://")
    command = server.get("command", ["{port}"])
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise ValueError(f"env.options.server.command is {command!r}; expected a list of words, the program first")
    if not any("{port}" in word for word in command):
        raise ValueError(
            f"env.options.server.command is {command!r}; one of its words must hold {{port}}, the port to listen on"
        )
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"env.options.server needs the package {package}: pip install 'asyncrl[{extra}]'")


async def url_of(server: Mapping[str, Any], start_s: float) -> str:
    """The server's URL, without a final slash. Raises ConnectionError when it does not serve within `start_s`."""
    if "url" in server:
        return str(server["url"]).rstrip("/")
    servers, key = _started.setdefault(asyncio.get_running_loop(), {}), json.dumps(server, sort_keys=True)
    while True:
        if key not in servers or servers[key].ended.done():
            servers[key] = _StartedServer(server, start_s)
        # Another episode may replace it meanwhile.
        started = servers[key]
        if url := await started.url():
            return url
        # It is gone, and its task is about to notice.
        await asyncio.wait([started.ended])


@functools.cache
def tls() -> ssl.SSLContext:
    """One TLS context for all clients: reading the certificates takes longer than an episode's requests."""
    return ssl.create_default_context()


class _StartedServer:
    def __init__(self, server: Mapping[str, Any], start_s: float) -> None:
        port, named = free_port(), {"{python}": sys.executable}
        self._words = [named.get(word, word).replace("{port}", str(port)) for word in server["command"]]
        self._process = ServerProcess(self._words, server.get("env", {}))
        self._port, self._start_s = port, start_s
        self._serves: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serves.add_done_callback(lambda serves: serves.cancelled() or serves.exception())  # mark as retrieved
        self.ended = asyncio.create_task(self._hold(), name="environment server")

    async def url(self) -> str:
        """The URL, once the server serves; empty if nothing listens there any more."""
        # Shielded: cancelling an episode must not end the server.
        await asyncio.shield(self._serves)
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return ""
        writer.close()
        return f"http://127.0.0.1:{self._port}"

    async def _hold(self) -> None:
        import httpx

        now, why = asyncio.get_running_loop().time, ""
        deadline = now() + self._start_s
        try:
            self._process.start()
            async with httpx.AsyncClient(verify=tls(), trust_env=False, timeout=self._start_s) as http:
                while not (why := self._process.ended()):
                    if not self._serves.done():
                        with contextlib.suppress(httpx.TransportError):
                            await http.get(f"http://127.0.0.1:{self._port}")  # any answer will do
                            self._serves.set_result(None)
                    if not self._serves.done() and now() > deadline:
                        why = f"it did not serve within {self._start_s:g} s (env.options.start_s)"
                        break
                    await asyncio.sleep(LOOK_S)
        except OSError as error:
            why = str(error)
        finally:
            if not self._serves.done():
                command = " ".join(self._words)[:200]
                self._serves.set_exception(ConnectionError(f"server {command}: {why or 'the actor stops'}"))
            await asyncio.to_thread(self._process.stop)


_started: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _StartedServer]] = WeakKeyDictionary()
