"""Tools of MCP servers (pip install 'asyncrl[mcp]') for the policy.

One connection per server and actor, opened by the first episode that needs it and shared by all; `per_episode: true`
gives each episode its own, for servers with state. MCP has tools but no reward: the final text is scored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from asyncrl.actors.envs.adapters.server import tls
from asyncrl.actors.envs.protocol import Message, Task, Tool
from asyncrl.actors.envs.resuming import Way
from asyncrl.actors.envs.tool import ToolError
from asyncrl.actors.envs.tool_env import ToolEnvironment
from asyncrl.rewards import ScoreSpec

log = logging.getLogger(__name__)

INVALID_PARAMS = -32602
"""Error code of JSON-RPC for a wrong call to a working server."""
CLOSE_S = 10.0
SILENT_S = 10.0
"""Seconds without any answer after a cancelled call, after which a server counts as blocked."""
_OWN = (
    ". Its own words are on stderr; a server that needs packages of its own is started by the Python of its own "
    "environment: command: [/path/to/venv/bin/python, server.py]"
)


class McpToolEnv(ToolEnvironment):
    """The policy may call the tools of MCP servers (pip install 'asyncrl[mcp]'); its final text is scored.

    The policy reads a result that the server marks as an error. A failing server is `env_error`, and the next episode
    connects again.
    """

    def __init__(  # noqa: PLR0913 - the options of a configuration
        self,
        servers: list[dict[str, Any]],
        score: ScoreSpec,
        *,
        only: list[str] | None = None,
        per_episode: bool = False,
        replayable: bool = False,
        connect_s: float = 30.0,
        max_turns: int | None = None,
        tool_timeout_s: float = 30.0,
        max_tool_chars: int = 4000,
    ) -> None:
        """
        Args:
            servers: each `{command: [program, argument, ...]}`, started over stdio, optionally with `env` and `cwd`; a
                word `{python}` is asyncrl's Python. Or `{url: http://...}`: a running server, over streamable HTTP.
            score, max_turns, tool_timeout_s, max_tool_chars: as in ToolEnvironment.
            only: names of the tools to offer; None: all.
            per_episode: a connection (over stdio: a server process) for each episode instead of one for all.
            replayable: with `per_episode`: equal calls in equal order get equal results from a new connection, so that
                an interrupted episode can call again what it had called (`buffer.turns`). Servers that all episodes
                share keep nothing for one of them, and need not be called again.
            connect_s: deadline for a server to start and list its tools; `env.call_s` bounds it too.
        """
        super().__init__((), score, max_turns=max_turns, tool_timeout_s=tool_timeout_s, max_tool_chars=max_tool_chars)
        self._servers, self._only = servers, only
        self._per_episode, self._connect_s = per_episode, connect_s
        self.replayable = replayable
        self._own: list[McpConnection] = []

    @property
    def resumed_by(self) -> Way:
        if not self._per_episode:
            return "snapshot"
        return "replay" if self.replayable else "none"

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raises ValueError for an invalid server, a missing package, or a wrong score."""
        ToolEnvironment.check(options)
        for index, server in enumerate(options.get("servers", ())):
            _check_server(server, f"env.options.servers.{index}")
        try:
            import mcp as _mcp  # noqa: F401
        except ModuleNotFoundError as error:
            raise ValueError(f"env.name mcp needs the package: {error}. pip install 'asyncrl[mcp]'") from error

    async def reset(self, task: Task) -> list[Message]:
        """Raises ConnectionError when a server does not come up, ValueError when `only` names a missing tool."""
        tools: list[Tool] = []
        for server in self._servers:
            if self._per_episode:
                connection = McpConnection(server, self._connect_s)
                self._own.append(connection)
            else:
                connection = shared(server, self._connect_s)
            tools += await connection.tools()
        if missing := set(self._only or ()) - {tool.name for tool in tools}:
            raise ValueError(f"env.options.only names {sorted(missing)}; the servers have {[t.name for t in tools]}")
        self.tools = [tool for tool in tools if self._only is None or tool.name in self._only]
        return await super().reset(task)

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._own))


class McpConnection:
    """A client that is connected while its task runs: one task must enter and leave MCP's context."""

    def __init__(self, server: Mapping[str, Any], connect_s: float) -> None:
        """`server`: as in the options; with a `url`, also `headers`."""
        self._server, self._connect_s = server, connect_s
        self._leave = asyncio.Event()
        self._ready: asyncio.Future[tuple[Any, list[Tool]]] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # mark as retrieved
        self._task = asyncio.create_task(self._hold(), name="mcp")
        self._answered = 0.0
        """Time of the last answer, by `time.monotonic`."""
        self._probe: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        return not self._task.done() and not self._leave.is_set()

    async def tools(self) -> list[Tool]:
        # Shielded: cancelling an episode must not end the connection.
        return (await asyncio.shield(self._ready))[1]

    async def close(self) -> None:
        """Close the connection; the server's process has ended, or is killed, when this returns."""
        self._leave.set()
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_S)

    async def _hold(self) -> None:
        from mcp import Client

        try:
            async with asyncio.timeout(self._connect_s) as connecting, Client(_target(self._server)) as client:
                listed = (await client.list_tools()).tools
                connecting.reschedule(None)
                self._ready.set_result((client, [self._tool(client, tool) for tool in listed]))
                await self._leave.wait()
        except Exception as error:  # mcp, its transports and anyio share no base class
            if self._ready.done():
                log.warning("MCP server %s: the connection ended: %s", _name(self._server), _cause(error))
            else:
                self._ready.set_exception(ConnectionError(f"MCP server {_name(self._server)}: {_cause(error)}{_OWN}"))
        finally:
            self._leave.set()
            self._ready.cancel()
            if self._probe is not None:
                self._probe.cancel()

    def _tool(self, client: Any, listed: Any) -> Tool:
        described = {"name": listed.name, "description": listed.description or "", "parameters": listed.input_schema}
        schema = {"type": "function", "function": described}
        return Tool(listed.name, schema, functools.partial(self._call, client, listed.name))

    async def _call(self, client: Any, tool: str, /, **arguments: Any) -> str:
        from mcp import MCPError

        if not self.usable:
            raise ConnectionError(f"MCP server {_name(self._server)}: the connection is closed")
        try:
            result = await client.call_tool(tool, arguments)
            self._answered = time.monotonic()
        except asyncio.CancelledError:  # by its deadline, or with its episode: the call is slow, or the server blocked
            if self.usable and self._probe is None:
                self._probe = asyncio.create_task(self._leave_if_silent(client), name="mcp-probe")
            raise
        except MCPError as error:
            self._answered = time.monotonic()
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from error
            self._leave.set()
            raise ConnectionError(f"MCP server {_name(self._server)}, tool {tool}: {error.message}") from error
        except Exception:  # perhaps of the transport: the connection may be broken, so it is not used again
            self._leave.set()
            raise
        text = "\n".join(_text(part) for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _leave_if_silent(self, client: Any) -> None:
        """End the connection, and over stdio the server, unless it answers this request or any other."""
        from mcp import MCPError

        began = time.monotonic()
        try:
            async with asyncio.timeout(SILENT_S):
                await client.session.list_tools()  # the protocol's ping is gone since 2026-07
        except MCPError:
            pass  # an answer as well
        except Exception as error:  # also of the transport
            if self._answered < began:
                log.warning(
                    "MCP server %s is blocked, and the next episode connects again: %r", _name(self._server), error
                )
                self._leave.set()
        finally:
            self._probe = None


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, McpConnection]] = WeakKeyDictionary()


def shared(server: Mapping[str, Any], connect_s: float) -> McpConnection:
    """The connection to `server` that this event loop shares; it ends with the loop."""
    connections = _shared.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps(server, sort_keys=True)
    if key not in connections or not connections[key].usable:
        connections[key] = McpConnection(server, connect_s)
    return connections[key]


def _check_server(server: Any, field: str) -> None:
    given = set(server) if isinstance(server, Mapping) else set()
    if given != {"url"} and not {"command"} <= given <= {"command", "env", "cwd"}:
        raise ValueError(
            f"{field} is {server!r}; expected {{command: [program, ...], env, cwd}} or {{url: http://...}}"
        )
    command = server.get("command", ["-"])
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise ValueError(f"{field}.command is {command!r}; expected a list of words, the program first")
    if not str(server.get("url", "http://")).startswith(("http://", "https://")):
        raise ValueError(f"{field}.url is {server['url']!r}; expected http:// or https://")


def _target(server: Mapping[str, Any]) -> Any:
    if "url" in server:
        return _over_http(server["url"], server["headers"]) if "headers" in server else server["url"]
    from mcp import StdioServerParameters

    # With ASYNCRL_RUN the launcher finds, and ends, processes that a run has left behind.
    marks = {name: os.environ[name] for name in ("ASYNCRL_RUN",) if name in os.environ}
    program, *words = (sys.executable if word == "{python}" else word for word in server["command"])
    return StdioServerParameters(command=program, args=words, env=marks | server.get("env", {}), cwd=server.get("cwd"))


@contextlib.asynccontextmanager
async def _over_http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    # No deadline here: a reply takes as long as its tool, which has a deadline in the environment.
    http = httpx2.AsyncClient(headers=dict(headers), timeout=None, verify=tls(), trust_env=False)
    async with http, streamable_http_client(url, http_client=http) as streams:
        yield streams


def _text(part: Any) -> str:
    return part.text if part.type == "text" else f"[{part.type}: not shown]"


def _name(server: Mapping[str, Any]) -> str:
    return server.get("url") or " ".join(server["command"])


def _cause(error: BaseException) -> str:
    """The first error that is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
