"""asyncrl: asynchronous reinforcement learning for language-model agents.

    import asyncrl

    class Guess(asyncrl.Environment):
        async def reset(self, task): ...
        async def step(self, message) -> asyncrl.Turn: ...

    run = asyncrl.train(asyncrl.Config.load("guess.yaml"))

Nothing heavy is imported before it is used. The main nouns, and the files that define them:

    task, message        data/base.py
    environment, turn    actors/envs/protocol.py
    ticket, trajectory   trajectory/: permission to play one episode, and the record of it
    group                buffer/ledger/group.py: the trajectories of one prompt
    batch                buffer/batches/: the groups of one training step; learner/batch/: their rows as arrays
    staleness            buffer/staleness.py: training steps between sampling a token and consuming it
    loss                 learner/losses/, with learner/advantages/ and learner/corrections/
    weights              weights/protocol.py: (branch, version, digest)
    run                  run_folder.py: everything that one run leaves; launch/run.py: its handle in Python
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is not imported before asyncrl/cli/hidden.py has looked at the working folder
if TYPE_CHECKING:
    from typing import Any

    from asyncrl.actors.envs.protocol import Environment, Turn, state_key
    from asyncrl.actors.envs.tool_env import ToolEnvironment
    from asyncrl.config import Config
    from asyncrl.launch.run import Run, open_run, train
    from asyncrl.learner.advantages import Advantages
    from asyncrl.learner.corrections.correction import Correction
    from asyncrl.learner.losses.policy_loss import PolicyLoss

__version__ = "0.1.0"
__all__ = [
    "Advantages", "Config", "Correction", "Environment", "PolicyLoss", "Run", "ToolEnvironment", "Turn", "open_run",
    "state_key", "train",
]  # fmt: skip

_DEFINED = {
    "Environment": "asyncrl.actors.envs.protocol:Environment",
    "Turn": "asyncrl.actors.envs.protocol:Turn",
    "state_key": "asyncrl.actors.envs.protocol:state_key",
    "ToolEnvironment": "asyncrl.actors.envs.tool_env:ToolEnvironment",
    "Config": "asyncrl.config:Config",
    "train": "asyncrl.launch.run:train",
    "open_run": "asyncrl.launch.run:open_run",
    "Run": "asyncrl.launch.run:Run",
    # For authors of algorithms.
    "Advantages": "asyncrl.learner.advantages:Advantages",
    "PolicyLoss": "asyncrl.learner.losses.policy_loss:PolicyLoss",
    "Correction": "asyncrl.learner.corrections.correction:Correction",
}
"""Where each public name is defined; it is imported when it is first used."""


def __getattr__(name: str) -> Any:
    if name not in _DEFINED:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    import importlib

    module, _, attribute = _DEFINED[name].partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_DEFINED})
