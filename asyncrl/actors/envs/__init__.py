"""Environments: what the policy acts in. `ENVIRONMENTS` names those that come with asyncrl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.actors.envs.adapters.mcp import McpToolEnv
from asyncrl.actors.envs.adapters.nemo_gym import NemoGymEnv
from asyncrl.actors.envs.adapters.openenv import OpenEnvEnv
from asyncrl.actors.envs.adapters.text_gym import TextGymEnv
from asyncrl.actors.envs.adapters.verifiers import play_verifiers
from asyncrl.actors.envs.agent import provided_by_actor
from asyncrl.actors.envs.calculator import CalculatorEnv
from asyncrl.actors.envs.lookup import LookupEnv
from asyncrl.actors.envs.mix import MixEnv
from asyncrl.actors.envs.python_tool import PythonToolEnv
from asyncrl.actors.envs.single_turn import SingleTurnEnv
from asyncrl.actors.envs.tool_env import ToolEnv

__all__ = ["ENVIRONMENTS", "provided_by_actor"]

ENVIRONMENTS: dict[str, Callable[..., Any]] = {
    "calculator": CalculatorEnv,
    "lookup": LookupEnv,
    "mcp": McpToolEnv,
    "mix": MixEnv,
    "nemo_gym": NemoGymEnv,
    "openenv": OpenEnvEnv,
    "python_tool": PythonToolEnv,
    "single_turn": SingleTurnEnv,
    "text_gym": TextGymEnv,
    "tools": ToolEnv,
    "verifiers": play_verifiers,
}
"""A config names one of these, or gives an import path `package.module:name`. Called once per episode.
`verifiers` is an agent, which plays whole episodes; the others make an `Env`."""
