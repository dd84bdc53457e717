"""Environments: what the policy acts in. `ENVIRONMENTS` names those that come with asyncrl."""

ENVIRONMENTS: dict[str, str] = {
    "tools": "asyncrl.actors.envs.tool_env:ToolEnv",
    "single_turn": "asyncrl.actors.envs.single_turn:SingleTurnEnv",
    "lookup": "asyncrl.actors.envs.lookup:LookupEnv",
}
"""Name -> import path. A config names one of these, or gives an import path `package.module:name` of its own."""
