"""Resources servers of NeMo Gym, over HTTP: the policy plays here, the server has the tools and scores the episode.

    POST /seed_session   the row                                           -> a session, carried by cookies
    POST /<tool>         the arguments; or over MCP, as /seed_session says -> what the policy reads
    POST /verify         the row, and the episode as a Responses object    -> reward
    POST /close_session  if the server supports it

NeMo Gym's agents and model servers are not needed: the episode loop calls the policy itself, so every sampled token is
recorded with its logprob and its policy version.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.actors.envs.adapters.mcp import McpConnection
from asyncrl.actors.envs.adapters.server import check_server, tls, url_of
from asyncrl.actors.envs.protocol import Message, Task, Tool, Turn
from asyncrl.actors.envs.tool import ToolError
from asyncrl.actors.envs.tool_env import ToolEnvironment
from asyncrl.rewards import Scored

POLICYS_FAULT = (400, 404, 409, 422)
"""Status codes of a tool for wrong calls; the policy reads why. Any other failure is `env_error`."""
NOT_METRICS = ("reward", "mask_sample")


class NemoGymEnv(ToolEnvironment):
    """Tools and reward of a NeMo Gym resources server (pip install 'asyncrl[nemo-gym]', the server elsewhere)."""

    def __init__(
        self,
        server: dict[str, Any],
        *,
        max_turns: int | None = None,
        tool_timeout_s: float = 30.0,
        max_tool_chars: int = 4000,
        start_s: float = 120.0,
    ) -> None:
        """
        Args:
            server: `{url: http://...}`, a running server, or `{command: [program, ...], env: {...}}`, started by each
                actor: a word `{python}` is asyncrl's Python, and `{port}` the port to listen on.
            max_turns, tool_timeout_s, max_tool_chars: as in ToolEnvironment.
            start_s: deadline for a started server to serve; `env.call_s` bounds it too.
        """
        super().__init__((), max_turns=max_turns, tool_timeout_s=tool_timeout_s, max_tool_chars=max_tool_chars)
        self._server, self._start_s = server, start_s
        self._session = uuid.uuid4().hex
        self._played: list[dict[str, Any]] = []
        self._http: Any = None
        self._mcp: McpConnection | None = None

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raises ValueError for an invalid server, or a missing package."""
        check_server(options.get("server"), ("httpx",), "nemo-gym")

    async def reset(self, task: Task) -> list[Message]:
        """Raises ConnectionError when the server does not answer, RuntimeError when it refuses the row, ValueError for
        a row whose tools are not functions."""
        import httpx

        url = await url_of(self._server, self._start_s)
        # One client per session, since it holds the cookies. Deadlines: env.call_s, tool_timeout_s.
        self._http = httpx.AsyncClient(base_url=url, verify=tls(), timeout=None, trust_env=False)
        seeded = _content(await self._post("seed_session", task["row"]), "seed_session")
        listed = task["row"]["responses_create_params"].get("tools") or []
        if not listed and isinstance(seeded, Mapping) and (mcp := seeded.get("mcp")):
            place = {"url": f"{url}/{mcp['url_path'].lstrip('/')}", "headers": mcp["headers"]}
            self._mcp = McpConnection(place, self._start_s)
            self.tools = await self._mcp.tools()
        else:
            self.tools = [self._tool(tool) for tool in listed]
        return await super().reset(task)

    async def step(self, message: Message) -> Turn:
        self._played += _items(message, len(self._played))
        turn = await super().step(message)
        self._played += [_output(call, result) for call, result in zip(self._calls(), turn.messages, strict=False)]
        return turn

    async def score(self, solution: str) -> Scored:
        """The score of the server's verifier. Raises RuntimeError when the server masks the sample."""
        row = self.task["row"]
        body = {**row, "response": _response(self._session, self._played, row["responses_create_params"])}
        verified = _content(await self._post("verify", body), "verify")
        if verified.get("mask_sample"):
            raise RuntimeError(
                f"verify: {verified.get('failure_kind')}: {verified.get('failure_reason')} (mask_sample)"
            )
        metrics = {
            name: float(value)
            for name, value in verified.items()
            if name not in NOT_METRICS and isinstance(value, bool | int | float) and math.isfinite(value)
        }
        return Scored(float(verified["reward"]), metrics, dict(verified.get("reward_components") or {}))

    async def close(self) -> None:
        import httpx

        if self._mcp is not None:
            await self._mcp.close()
        if self._http is None:
            return
        ids = {"resources_session_id": self._session, "episode_id": {"rollout_id": self._session}}
        try:
            with contextlib.suppress(httpx.HTTPError):  # most servers lack this route
                await self._http.post("close_session", json=ids)
        finally:  # also past env.call_s
            await self._http.aclose()

    def _tool(self, listed: Mapping[str, Any]) -> Tool:
        if listed.get("type") != "function":
            raise ValueError(f"a tool of the row is {listed.get('type')!r}; expected functions")
        empty = {"type": "object", "properties": {}}
        described = {"name": listed["name"], "description": listed.get("description") or ""}
        schema = {"type": "function", "function": described | {"parameters": listed.get("parameters") or empty}}
        return Tool(listed["name"], schema, functools.partial(self._use, listed["name"]))

    async def _use(self, tool: str, /, **arguments: Any) -> str:
        reply = await self._post(tool, arguments)
        if reply.status_code in POLICYS_FAULT:
            raise ToolError(reply.text)
        _content(reply, tool)
        return str(reply.text)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        import httpx

        try:
            return await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise ConnectionError(f"NeMo Gym server, {path}: {type(error).__name__} {error}") from error

    def _calls(self) -> list[dict[str, Any]]:
        """The calls of the last message, in the order of their results."""
        calls: list[dict[str, Any]] = []
        for item in reversed(self._played):
            if item["type"] != "function_call":
                break
            calls.insert(0, item)
        return calls


def _content(reply: Any, what: str) -> Any:
    if not reply.is_success:
        raise RuntimeError(f"NeMo Gym server, {what}: {reply.status_code}: {reply.text[:500]}")
    return reply.json()


def _items(message: Message, at: int) -> list[dict[str, Any]]:
    """An assistant message as items of a Responses object. `at`: number of items before it."""
    thought, closed, text = (message.get("content") or "").rpartition("</think>")
    thought = thought.replace("<think>", "").strip() if closed else ""
    items: list[dict[str, Any]] = []
    if thought:
        items.append({"type": "reasoning", "id": f"rs_{at}", "summary": [{"type": "summary_text", "text": thought}]})
    calls = message.get("tool_calls") or []
    if text.strip() or not calls:
        content: list[Any] = [{"type": "output_text", "text": text.strip(), "annotations": []}]
        message_item = {"type": "message", "id": f"msg_{at}", "role": "assistant", "status": "completed"}
        items.append(message_item | {"content": content})
    for index, call in enumerate(calls):
        function, arguments = call["function"], call["function"].get("arguments", "")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        ids = {
            "type": "function_call",
            "id": f"fc_{at}_{index}",
            "call_id": f"call_{at}_{index}",
            "status": "completed",
        }
        items.append(ids | {"name": function.get("name", ""), "arguments": written})
    return items


def _output(call: Mapping[str, Any], result: Message) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": result["content"]}


def _response(session: str, played: Sequence[Mapping[str, Any]], params: Mapping[str, Any]) -> dict[str, Any]:
    """The episode as one Responses object, like that of NeMo Gym's agent."""
    return {
        "id": f"resp_{session}",
        "object": "response",
        "created_at": time.time(),
        "status": "completed",
        "model": params.get("model") or "policy",
        "output": list(played),
        "tools": params.get("tools") or [],
        "tool_choice": params.get("tool_choice", "auto"),
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
    }
