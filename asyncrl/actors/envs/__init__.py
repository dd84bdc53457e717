"""Environments: what the policy acts in. `ENVIRONMENTS` names those that come with asyncrl."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.actors.envs.agent import provided_by_actor
from asyncrl.actors.envs.calculator_env import CalculatorEnv
from asyncrl.actors.envs.lookup import LookupEnv
from asyncrl.actors.envs.mcp_tools import McpToolEnv
from asyncrl.actors.envs.protocol import Env
from asyncrl.actors.envs.python_tool import PythonToolEnv
from asyncrl.actors.envs.single_turn import SingleTurnEnv
from asyncrl.actors.envs.tool_env import ToolEnv

__all__ = ["ENVIRONMENTS", "provided_by_actor"]

ENVIRONMENTS: dict[str, Callable[..., Env]] = {
    "calculator": CalculatorEnv,
    "lookup": LookupEnv,
    "mcp": McpToolEnv,
    "python_tool": PythonToolEnv,
    "single_turn": SingleTurnEnv,
    "tools": ToolEnv,
}
"""A config names one of these, or gives an import path `package.module:name`. Called once per episode."""
