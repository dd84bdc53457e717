"""An agent written with the openai client, as for any OpenAI-compatible server: a loop over tool calls.

    asyncrl launch --config configs/agent-openai.yaml

asyncrl calls `agent` once per episode. The client's base URL belongs to this episode: every token that the policy
samples for it is recorded with its logprob and its policy version. The function returns the reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from asyncrl.actors.envs.calculator import calculate
from asyncrl.actors.envs.tool import ToolError

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, description, argument in (
        ("lookup", "Look up a key in the store.", "key"),
        ("calculate", "Work out an arithmetic expression.", "expression"),
    )
]


async def agent(task: Mapping[str, Any], client: AsyncOpenAI, *, max_turns: int = 6) -> dict[str, float]:
    """Answer the task's question with two tools. Success is 1 when the last message is exactly the answer.

    Args:
        task: a task of `data.source: lookup`: `prompt`, `store`, `answer`.
        client: the client of this episode.
        max_turns: number of requests to the policy; after them the episode has failed.
    """
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(max_turns):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return {"success": float((message.content or "").strip() == task["answer"])}
        messages.append(message)
        for call in message.tool_calls:
            result = await use(call.function.name, call.function.arguments, task["store"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"success": 0.0}


async def use(name: str, arguments: str, store: Mapping[str, int]) -> str:
    """The result of a call, or an error message, so that the policy can do better in its next turn."""
    try:
        values = json.loads(arguments)
        if name == "lookup":
            return str(store[values["key"]])
        if name == "calculate":
            return await calculate(values["expression"])
    except (ValueError, KeyError, TypeError, ToolError) as error:
        return f"error: {error}"
    return f"error: no tool {name}"
