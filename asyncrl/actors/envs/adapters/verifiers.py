"""Tasksets of the package verifiers, played by verifiers in a separate process, through the actor's endpoint.

One process per actor and configuration, under any Python that has verifiers:
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
    """A task of a taskset of verifiers (pip install verifiers, in a separate Python), played by its harness.

    Args:
        task: a task of `data.source: verifiers`.
        client: the client of this episode.
        taskset: verifiers' configuration of the taskset, as in `data.options`.
        python: the interpreter that has verifiers; empty: that of asyncrl.
        agent: verifiers' configuration of the agent; default: the null harness, in a process on this machine.
    Returns the rewards by name. Raises RuntimeError when verifiers reports an error, ConnectionError when its process
    ends.
    """
    command = [python or sys.executable, "-P", WORKER, worker_config(taskset, agent), "play"]
    rewards = await shared("verifiers", command).ask(
        index=int(task["index"]), base_url=str(client.base_url).rstrip("/")
    )
    return {name: float(value) for name, value in rewards.items()}
