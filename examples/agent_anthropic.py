"""An agent written with the anthropic client, streaming: a loop over tool calls.

asyncrl launch --config configs/agent-openai.yaml --env.name examples/agent_anthropic.py:agent
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anthropic import AsyncAnthropic

from asyncrl.actors.envs.calculator import calculate
from asyncrl.actors.envs.tool import ToolError

TOOLS: list[Any] = [
    {
        "name": name,
        "description": description,
        "input_schema": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
    }
    for name, description, argument in (
        ("lookup", "Look up a key in the store.", "key"),
        ("calculate", "Work out an arithmetic expression.", "expression"),
    )
]
CONNECTIONS = AsyncAnthropic(base_url="http://127.0.0.1", api_key="asyncrl")
"""One pool of connections for all episodes; each episode has a base URL of its own."""


async def agent(task: Mapping[str, Any], client: Any, *, max_turns: int = 6) -> dict[str, float]:
    """Answer the task's question with two tools; success is 1 when the last message is exactly the answer."""
    claude = CONNECTIONS.with_options(base_url=str(client.base_url).removesuffix("/").removesuffix("/v1"))
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(max_turns):
        asked: Any = {"model": "policy", "max_tokens": 48, "messages": messages, "tools": TOOLS}
        async with claude.messages.stream(**asked) as stream:
            message = await stream.get_final_message()
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            text = "".join(block.text for block in message.content if block.type == "text")
            return {"success": float(text.strip() == task["answer"])}
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": await use(call.name, call.input, task["store"])}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    return {"success": 0.0}


async def use(name: str, values: Mapping[str, Any], store: Mapping[str, int]) -> str:
    """The result of a call, or an error message, so that the policy can do better in its next turn."""
    try:
        return str(store[values["key"]]) if name == "lookup" else await calculate(str(values["expression"]))
    except (KeyError, TypeError, ToolError) as error:
        return f"error: {error}"
