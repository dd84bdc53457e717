"""An agent written with litellm: a loop over tool calls.

asyncrl launch --config configs/agent-openai.yaml --env.name examples/agent_litellm.py:agent
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network for prices

import litellm

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


async def agent(task: Mapping[str, Any], client: Any, *, max_turns: int = 6) -> dict[str, float]:
    """Answer the task's question with two tools; success is 1 when the last message is exactly the answer."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(max_turns):
        completion = await litellm.acompletion(
            model="openai/policy",
            api_base=str(client.base_url),
            api_key=client.api_key,
            messages=messages,
            tools=TOOLS,
            max_retries=2,
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return {"success": float((message.content or "").strip() == task["answer"])}
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = await use(call.function.name, call.function.arguments, task["store"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"success": 0.0}


async def use(name: str | None, arguments: str, store: Mapping[str, int]) -> str:
    """The result of a call, or an error message, so that the policy can do better in its next turn."""
    try:
        values = json.loads(arguments)
        return str(store[values["key"]]) if name == "lookup" else await calculate(values["expression"])
    except (ValueError, KeyError, TypeError, ToolError) as error:
        return f"error: {error}"
