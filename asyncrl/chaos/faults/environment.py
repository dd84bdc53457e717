"""Makes environments fail in the middle of their episode: each one in use raises at its next step, as if its process
had been killed. Later ones are not affected.

Processes started by environments are killed as well, where they can be distinguished from an engine's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from asyncrl.actors.envs import ENVIRONMENTS
from asyncrl.actors.envs.agent import is_agent
from asyncrl.actors.envs.protocol import Env, Message, Task, Tool, Turn
from asyncrl.chaos.injector import Injector
from asyncrl.chaos.plan import Fault
from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.processes import ROLE_MARKER, RUN_MARKER, kill_all, marked
from asyncrl.plugins import check_options, resolve
from asyncrl.run_folder import RunFolder

IN_PROCESS = ("hf",)
"""Engines that start no processes, so that all processes below an actor belong to its environments."""


class EnvironmentLost(Exception):
    """The injected failure."""


class Frail:
    """The environment `name`, until the file `sign` changes."""

    tools: Sequence[Tool] = ()

    def __init__(self, name: str, options: dict[str, Any], sign: str) -> None:
        """
        Args:
            name: the original `env.name`.
            options: the original `env.options`.
            sign: a file; each change of it makes every existing environment fail.
        """
        make: Callable[..., Env] = resolve(name, ENVIRONMENTS, "env.options.name")
        self._env = functools.partial(make, **options)()
        self._sign, self._began = Path(sign), _changed(Path(sign))

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Checks the options of the original environment. Raises ValueError."""
        make = resolve(options["name"], ENVIRONMENTS, "env.options.name")
        check_options(make, options["options"], "env.options.options")
        if callable(check := getattr(make, "check", None)):
            check(options["options"])

    @staticmethod
    def name_of(task: Task) -> str:
        return str(task.get("env", "frail"))

    async def reset(self, task: Task) -> list[Message]:
        messages = await self._env.reset(task)
        self.tools = self._env.tools
        return messages

    async def step(self, message: Message) -> Turn:
        """Raises EnvironmentLost."""
        if _changed(self._sign) != self._began:
            raise EnvironmentLost("lost by asyncrl chaos")
        return await self._env.step(message)

    async def close(self) -> None:
        await self._env.close()


class Environments(Injector):
    def __init__(self, config: Config) -> None:
        """Raises ConfigError where an agent's processes cannot be found."""
        self._agent = is_agent(resolve(config.env.name, ENVIRONMENTS, "env.name"))
        self._own = config.actors.engine in IN_PROCESS
        if self._agent and not self._own:
            raise ConfigError(
                f"--kill env: env.name is {config.env.name!r}, an agent, whose processes cannot be distinguished from "
                f"those of actors.engine {config.actors.engine!r}. Leave env out, or use actors.engine hf."
            )

    def changed(self, config: Config) -> Config:
        if self._agent:
            return config
        self._sign = (Path(config.launch.runs_dir) / f"{config.launch.name}.env-lost").absolute()
        options = {"name": config.env.name, "options": config.env.options, "sign": str(self._sign)}
        frail = config.env.model_copy(update={"name": f"{__name__}:Frail", "options": options})
        return config.model_copy(update={"env": frail})

    def open(self, run: RunFolder) -> None:
        self._run = run
        if not self._agent:
            self._sign.parent.mkdir(parents=True, exist_ok=True)
            self._sign.touch()

    def begin(self, fault: Fault) -> str:
        """Raises RunError for an agent that has started no process."""
        started = self._started() if self._own else []
        if self._agent and not started:
            raise RunError("--kill env: env.name is an agent, and it has started no process: leave env out.")
        kill_all(started)
        if not self._agent:
            self._sign.write_text(str(fault.at_s))
        return f"{len(started)} processes killed"

    def close(self) -> None:
        if not self._agent:
            self._sign.unlink(missing_ok=True)

    def _started(self) -> list[psutil.Process]:
        """The processes that actors have started."""
        roles = {pid: name for name, (pid, _) in self._run.record()["processes"].items()}
        actors = {pid for pid, name in roles.items() if name.startswith("actor-")}
        started = []
        for process in marked(RUN_MARKER, self._run.id):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                if process.pid not in roles and _below(process, actors):
                    started.append(process)
        return started


def _below(process: psutil.Process, actors: Collection[int]) -> bool:
    """Whether an actor started the process. What a forked actor forks has no role in its environment."""
    marker = process.environ().get(ROLE_MARKER, "")
    return marker.startswith("actor-") or any(parent.pid in actors for parent in process.parents())


def _changed(sign: Path) -> int:
    """Time of the last change; 0: the file is gone, because chaos has ended."""
    try:
        return sign.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
