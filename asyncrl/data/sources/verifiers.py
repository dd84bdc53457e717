"""Tasks of a taskset of the package verifiers, which has a Python of its own (docs/how-to/environments.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.data.order import ListedTasks, training_size
from asyncrl.data.sources.verifiers_worker import OTHER_VERSION
from asyncrl.errors import ConfigError

WORKER = str(Path(__file__).with_name("verifiers_worker.py"))


def worker_config(taskset: Mapping[str, Any], agent: Mapping[str, Any] | None) -> str:
    """verifiers' configuration as JSON, with this machine in place of its vendor's hosted sandbox."""
    defaults = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return json.dumps({"taskset": dict(taskset), "agent": defaults | dict(agent or {})}, sort_keys=True)


class VerifiersSource(ListedTasks):
    """The tasks of a taskset in verifiers' order, the last ones held out, in a new order in each epoch."""

    def __init__(
        self,
        taskset: dict[str, Any],
        *,
        python: str = "",
        size: int = 1000,
        held_out_size: int = 0,
        list_s: float = 300.0,
        seed: int = 0,
    ) -> None:
        """
        Args:
            taskset: verifiers' configuration of it, at least `{id: module or hub id}`. As in `env.options`.
            python: the interpreter that has verifiers; empty: this one.
            size: how many of its tasks to take, at most (a taskset may be without end).
            held_out_size: of these, how many are kept out of training.
            list_s: seconds that listing them may take.
        Raises ConfigError when verifiers cannot list them.
        """
        words = [python or sys.executable, "-P", WORKER, worker_config(taskset, None), "tasks", str(size)]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=list_s, check=False, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            raise ConfigError(
                f"data.options.python is {words[0]!r}, which does not start ({error.strerror}): make that Python, with "
                "verifiers in it, and name it in env.options.python too."
            ) from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"data.options.list_s is {list_s:g}, and listing the tasks of {taskset} took longer: raise it."
            ) from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ConfigError(_not_loaded(taskset, python or sys.executable, last))
        tasks = [
            {"id": f"{taskset['id']}-{index}", "prompt": task["prompt"], "index": index}
            for index, task in enumerate(json.loads(done.stdout))
        ]
        split = training_size(len(tasks), held_out_size, f"tasks of {taskset}")
        super().__init__("verifiers", tasks[:split], tasks[split:], seed)


def _not_loaded(taskset: dict[str, Any], python: str, last: str) -> str:
    """`last`: the error of verifiers' process."""
    if "No module named 'verifiers'" in last:
        return (
            f"data.source is verifiers, and {python} does not have the package: pip install verifiers in a Python of "
            "its own, and name that Python in data.options.python and env.options.python."
        )
    if last.startswith(OTHER_VERSION):
        return (
            f"data.source is verifiers, and {python} has a version of it that asyncrl does not know, "
            f"{last.removeprefix(OTHER_VERSION)}: pip install verifiers==0.4.0 there, the version that was tested."
        )
    return f"data.options.taskset is {taskset}, which verifiers does not load: {last}"
