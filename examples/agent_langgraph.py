"""An agent as a graph of LangGraph: a model and its tools, in turns.

asyncrl launch --config configs/agent-openai.yaml --env.name examples/agent_langgraph.py:agent
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from asyncrl.actors.envs.calculator import calculate as result_of


async def agent(task: Mapping[str, Any], client: Any, *, max_turns: int = 6) -> dict[str, float]:
    """Answer the task's question with two tools; success is 1 when the last message is exactly the answer."""

    @tool
    def lookup(key: str) -> str:
        """Look up a key in the store."""
        return str(task["store"][key])

    @tool
    async def calculate(expression: str) -> str:
        """Work out an arithmetic expression."""
        return await result_of(expression)

    tools = [lookup, calculate]
    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key).bind_tools(tools)

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", answer)
    graph.add_node("tools", ToolNode(tools, handle_tool_errors=True))  # an error is shown to the policy
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    asked = {"messages": [{"role": "user", "content": task["prompt"]}]}
    try:
        state = await graph.compile().ainvoke(asked, {"recursion_limit": 2 * max_turns})
    except GraphRecursionError:
        return {"success": 0.0}
    return {"success": float(str(state["messages"][-1].content).strip() == task["answer"])}
