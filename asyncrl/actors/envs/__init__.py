"""Environments: what the policy acts in. `ENVIRONMENTS` names those that come with asyncrl."""

from __future__ import annotations

from asyncrl.actors.envs.agent import provided_by_actor

__all__ = ["ENVIRONMENTS", "provided_by_actor"]

ENVIRONMENTS: dict[str, str] = {
    "calculator": "asyncrl.actors.envs.calculator:CalculatorEnv",
    "lookup": "asyncrl.actors.envs.lookup:LookupEnv",
    "mcp": "asyncrl.actors.envs.adapters.mcp:McpToolEnv",
    "mix": "asyncrl.actors.envs.mix:MixEnv",
    "nemo_gym": "asyncrl.actors.envs.adapters.nemo_gym:NemoGymEnv",
    "openenv": "asyncrl.actors.envs.adapters.openenv:OpenEnvEnv",
    "python_tool": "asyncrl.actors.envs.python_tool:PythonToolEnv",
    "single_turn": "asyncrl.actors.envs.single_turn:SingleTurnEnv",
    "text_gym": "asyncrl.actors.envs.adapters.text_gym:TextGymEnv",
    "tools": "asyncrl.actors.envs.tool_env:ToolEnvironment",
    "verifiers": "asyncrl.actors.envs.adapters.verifiers:play_verifiers",
}
"""Name -> import path; a config may also give an import path of its own. `verifiers` is an agent, which plays whole
episodes; the others are called once per episode and make an `Env`."""
