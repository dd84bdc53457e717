"""An agent of pydantic-ai with a typed result, which it asks for by `tool_choice: required`.

    asyncrl launch --config configs/agent-openai.yaml --env.name examples/agent_pydantic_ai.py:agent \\
        --actors.constraints ignore

Under `ignore` the policy samples freely; it is told that a reply is no valid result, and in the end the reward is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelRetry, UsageLimits
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from asyncrl.actors.envs.calculator import calculate as result_of
from asyncrl.actors.envs.tool import ToolError


async def agent(task: Mapping[str, Any], client: AsyncOpenAI, *, max_turns: int = 6) -> dict[str, float]:
    """Answer the task's question with two tools; success is 1 when the result is the answer, as a number."""
    solver = Agent(
        OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)),
        output_type=int,
        retries=max_turns,
    )

    @solver.tool_plain
    def lookup(key: str) -> str:
        """Look up a key in the store."""
        if key not in task["store"]:
            raise ModelRetry(f"no key {key}")
        return str(task["store"][key])

    @solver.tool_plain
    async def calculate(expression: str) -> str:
        """Work out an arithmetic expression."""
        try:
            return await result_of(expression)
        except ToolError as error:
            raise ModelRetry(str(error)) from error

    try:
        result = await solver.run(task["prompt"], usage_limits=UsageLimits(request_limit=max_turns))
    except (UnexpectedModelBehavior, UsageLimitExceeded):  # the policy's fault: a reward, no failure
        return {"success": 0.0}
    return {"success": float(str(result.output) == task["answer"])}
