"""An agent of OpenAI's Agents SDK, over the Responses API, which is its default.

asyncrl launch --config configs/agent-openai.yaml --env.name examples/agent_openai_agents.py:agent
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI

from asyncrl.actors.envs.calculator import calculate as result_of


async def agent(task: Mapping[str, Any], client: AsyncOpenAI, *, max_turns: int = 6) -> dict[str, float]:
    """Answer the task's question with two tools; success is 1 when the last message is exactly the answer."""

    @function_tool
    def lookup(key: str) -> str:
        """Look up a key in the store."""
        return str(task["store"][key])  # what a tool raises, the SDK shows to the policy

    @function_tool
    async def calculate(expression: str) -> str:
        """Work out an arithmetic expression."""
        return await result_of(expression)

    solver = Agent(
        name="solver",
        model=OpenAIResponsesModel(model="policy", openai_client=client),
        tools=[lookup, calculate],
    )
    try:
        result = await Runner.run(
            solver, task["prompt"], max_turns=max_turns, run_config=RunConfig(tracing_disabled=True)
        )
    except (MaxTurnsExceeded, ModelBehaviorError):  # the policy's fault (no such tool, no answer): a reward, no failure
        return {"success": 0.0}
    return {"success": float(str(result.final_output).strip() == task["answer"])}
