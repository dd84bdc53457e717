"""Environments of OpenEnv, over the WebSocket of their server: observations as text, actions as JSON.

one socket = one session = one episode
{"type": "reset" | "step" | "close", "data"} ──> {"type": "observation", "data": {observation, reward, done}}
                                                 {"type": "error", "data": {message, code}}
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.actors.envs.adapters.server import check_server, tls, url_of
from asyncrl.actors.envs.protocol import Environment, Message, Task, Turn
from asyncrl.actors.envs.tool_env import cut
from asyncrl.data.sources.seeds import opening

POLICYS_FAULT = "VALIDATION_ERROR"
"""Error code for an action that does not fit the schema. Every other code is a failure of the server: `env_error`."""
MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of schemas that do not describe the possible actions."""
MAX_BYTES = 2**26


class OpenEnvEnv(Environment):
    """An environment of OpenEnv, over its server's WebSocket (pip install 'asyncrl[openenv]', the server elsewhere)."""

    def __init__(
        self,
        server: dict[str, Any],
        *,
        reset: dict[str, Any] | None = None,
        observation: str = "",
        action: str = "",
        start_s: float = 120.0,
        max_chars: int = 4000,
    ) -> None:
        """
        Args:
            server: `{url: http://...}`, a running server, or `{command: [program, ...], env: {...}}`, started by each
                actor: a word `{python}` is asyncrl's Python, and `{port}` the port to listen on.
            reset: arguments of every reset; a task's `seed`, and its mapping `reset`, are added.
            observation: the field of an observation that the policy reads; empty: all of it, as JSON.
            action: the field of an action that takes the policy's text; empty: the text is the action, as JSON.
            start_s: deadline for a started server to serve; `env.call_s` bounds it too.
            max_chars: a longer observation is cut, with a note.
        """
        self._server, self._reset, self._start_s = server, reset or {}, start_s
        self._observation, self._action, self._max_chars = observation, action, max_chars
        self._schema: dict[str, Any] = {}
        self._socket: Any = None

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raises ValueError for an invalid server, or a missing package."""
        check_server(options.get("server"), ("websockets", "httpx"), "openenv")

    async def reset(self, task: Task) -> list[Message]:
        """Raises ConnectionError when the server does not answer, RuntimeError when it refuses, ValueError when it
        lacks the field `observation` or `action`, or has MCP tools instead of actions."""
        import httpx
        from websockets.asyncio.client import connect

        url = await url_of(self._server, self._start_s)
        try:
            async with httpx.AsyncClient(verify=tls(), timeout=None, trust_env=False) as http:  # env.call_s bounds it
                schema = (await http.get(f"{url}/schema")).raise_for_status().json()
            self._socket = await connect(
                re.sub("^http", "ws", url) + "/ws", open_timeout=None, max_size=MAX_BYTES, proxy=None
            )
        except (OSError, httpx.HTTPError) as error:
            raise ConnectionError(f"OpenEnv server {url}: {type(error).__name__}: {error}") from error
        if schema["action"].get("title") in MCP_ACTIONS:
            raise ValueError(
                f"OpenEnv server {url}: its actions are calls of MCP tools, which asyncrl does not support"
            )
        self._schema = _shown(schema["action"])
        if self._action and self._action not in self._schema["properties"]:
            raise ValueError(f"env.options.action is {self._action!r}; an action has {[*self._schema['properties']]}")
        seed = {"seed": task["seed"]} if "seed" in task else {}
        result = await self._ask("reset", {**self._reset, **seed, **task.get("reset", {})})
        instruction = f"Answer with one action: a JSON object of this schema.\n{json.dumps(self._schema)}"
        return opening(task, "" if self._action else instruction, self._seen(result))

    async def step(self, message: Message) -> Turn:
        try:
            result = await self._ask("step", self._parsed(message.get("content") or ""))
        except _InvalidAction as error:
            return Turn(messages=[{"role": "user", "content": f"error: {error}"}])
        seen = [] if result["done"] else [{"role": "user", "content": self._seen(result)}]
        return Turn(messages=seen, reward=float(result["reward"] or 0.0), done=bool(result["done"]))

    async def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError, _closed()):  # the server may be gone; the session ends either way
                await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        try:
            with contextlib.suppress(_closed()):  # it may have sent a reason before it closed
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(await self._socket.recv())
        except (OSError, _closed()) as error:
            raise ConnectionError(f"OpenEnv server, {kind}: {type(error).__name__}: {error}") from error
        if reply["type"] == "error":
            why, code = reply["data"].get("message"), reply["data"].get("code")
            if kind == "step" and code == POLICYS_FAULT:
                raise _InvalidAction(_problems(reply["data"].get("errors", ())) or why)
            full = ": raise its max_concurrent_envs to actors.slots at least" if code == "CAPACITY_REACHED" else ""
            raise RuntimeError(f"OpenEnv server, {kind}: {code}: {why}{full}")
        return {"reward": None, "done": False, **reply["data"]}

    def _seen(self, result: Mapping[str, Any]) -> str:
        seen = result["observation"]
        if self._observation:
            if self._observation not in seen:
                raise ValueError(f"env.options.observation is {self._observation!r}; an observation has {[*seen]}")
            seen = seen[self._observation]
        return cut(seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False), self._max_chars)

    def _parsed(self, text: str) -> dict[str, Any]:
        text = re.sub(r"^.*</think>", "", text, flags=re.DOTALL).strip()
        if self._action and self._schema["properties"][self._action].get("type") == "string":
            return {self._action: text}
        try:
            value = json.loads(re.sub(r"^```\w*\n(.*)\n```$", r"\1", text, flags=re.DOTALL))
        except (ValueError, RecursionError) as error:
            raise _InvalidAction(f"the answer is not JSON: {error}") from error
        if self._action:
            return {self._action: value}
        if not isinstance(value, dict):
            raise _InvalidAction("the answer is not a JSON object")
        return value


class _InvalidAction(Exception):
    """The policy's text is not an action; the message tells the policy why."""


def _shown(schema: Mapping[str, Any]) -> dict[str, Any]:
    """An action's schema without OpenEnv's own field."""
    properties = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    return {**schema, "properties": properties}


def _problems(errors: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{'.'.join(map(str, error['loc'])) or 'action'}: {error['msg']}" for error in errors)


def _closed() -> type[Exception]:
    from websockets.exceptions import ConnectionClosed

    return ConnectionClosed
