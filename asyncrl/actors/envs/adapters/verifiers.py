"""Tasksets of the package verifiers, played by verifiers itself in a process of its own, through the actor's endpoint.

One worker process per actor and configuration, under any Python that has verifiers:
`asyncrl/data/sources/verifiers_worker.py`.
"""

from __future__ import annotations

import sys
from typing import Any

from asyncrl.actors.envs.adapters.foreign_process import shared
from asyncrl.data.base import Task
from asyncrl.data.sources.verifiers import WORKER, worker_config


async def play_verifiers(
    task: Task, client: Any, *, taskset: dict[str, Any], python: str = "", agent: dict[str, Any] | None = None
) -> dict[str, float]:
    """A task of a taskset of verifiers (pip install verifiers, in a Python of its own), played by its harness.

    Args:
        task: of `data.source: verifiers`.
        client: bound to this episode.
        taskset: verifiers' configuration of it, as in `data.options`.
        python: the interpreter that has verifiers; empty: this one.
        agent: verifiers' configuration of the agent; default: the null harness, as a process of this machine.
    Returns the rewards by name. Raises RuntimeError when verifiers reports an error, ConnectionError when its process
    ends.
    """
    command = [python or sys.executable, "-P", WORKER, worker_config(taskset, agent), "play"]
    rewards = await shared("verifiers", command).ask(
        index=int(task["index"]), base_url=str(client.base_url).rstrip("/")
    )
    return {name: float(value) for name, value in rewards.items()}
