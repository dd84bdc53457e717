"""A tool-calling agent of smolagents, which is written in plain functions, so asyncrl plays it in a thread.

    asyncrl launch --config configs/agent-openai.yaml --env.name examples/agent_smolagents.py:agent \\
        --actors.constraints ignore

smolagents asks for `tool_choice: required`; under `ignore` the policy samples freely and learns to call `final_answer`.
It writes earlier calls into its requests as text, so every step begins a new row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

from asyncrl.actors.envs.calculator import calculate as result_of


def agent(task: Mapping[str, Any], client: Any, *, max_turns: int = 6, short_prompts: bool = True) -> dict[str, float]:
    """Answer the task's question with two tools; success is 1 when the final answer is exactly the task's.

    Args:
        task: a task of `data.source: lookup`.
        client: its base URL is the episode's.
        max_turns: number of requests to the policy.
        short_prompts: leave out the prompts of smolagents, which the quickstart's model has no room for.
    """

    @tool
    def lookup(key: str) -> str:
        """Look up a key in the store.

        Args:
            key: the word to look up
        """
        return str(task["store"][key])

    @tool
    def calculate(expression: str) -> str:
        """Work out an arithmetic expression.

        Args:
            expression: e.g. "41 - 17"
        """
        return asyncio.run(result_of(expression))

    solver = ToolCallingAgent(
        tools=[lookup, calculate],
        model=OpenAIModel("policy", api_base=str(client.base_url), api_key=client.api_key),
        prompt_templates=EMPTY_PROMPT_TEMPLATES if short_prompts else None,
        max_steps=max_turns - 1,  # past it, smolagents asks once more, for a final answer
        verbosity_level=LogLevel.OFF,
    )
    return {"success": float(str(solver.run(task["prompt"])).strip() == task["answer"])}
