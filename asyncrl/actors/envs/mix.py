"""Several environments as one: each task is played in the environment of its source (`data.source: mix`)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.actors.envs import ENVIRONMENTS
from asyncrl.actors.envs.agent import is_agent
from asyncrl.actors.envs.protocol import Env, Environment, Message, Task, Turn
from asyncrl.actors.envs.resuming import Way, told, way_of
from asyncrl.config.rules.environments import LIMITS
from asyncrl.plugins import check_options, resolve
from asyncrl.trajectory.turns import Snapshot

_FIELDS = {"name", "options", "reward_weight"}


class MixEnv(Environment):
    """Plays a task in the environment that its `env` names. Metrics count the episode under that name."""

    def __init__(self, envs: dict[str, dict[str, Any]]) -> None:
        """
        Args:
            envs: by the name of their source in `data.options.sources`: `{name, options}`, as `env.name` and
                `env.options`; `reward_weight`, a factor of their rewards, 1 if not set; and their own limits:
                `max_turns`, `max_tokens`, `max_new_tokens`, `call_s`.
        """
        self._envs = envs
        self._weight = 1.0
        self._env: Env | None = None

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Check every environment of the mix. Raises ValueError."""
        for name, spec in options.get("envs", {}).items():
            field = f"env.options.envs.{name}"
            if not isinstance(spec, Mapping) or "name" not in spec or set(spec) - _FIELDS - set(LIMITS):
                raise ValueError(
                    f"{field} is {spec!r}; expected {{name: ..., options: ..., reward_weight: ...}}, and any of "
                    f"{', '.join(LIMITS)}"
                )
            weight = spec.get("reward_weight", 1.0)
            if not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"{field}.reward_weight is {weight!r}; expected a finite number")
            make, inner = _maker(spec, field), spec.get("options", {})
            if is_agent(make):
                raise ValueError(
                    f"{field}.name is {spec['name']!r}, an agent; a mix holds environments only. Train it alone."
                )
            check_options(make, inner, f"{field}.options")
            if callable(check := getattr(make, "check", None)):
                try:
                    check(inner)
                except ValueError as error:
                    raise ValueError(f"{field}: {error}") from error

    @staticmethod
    def name_of(task: Task) -> str:
        """The name that metrics count the episode of `task` under."""
        return str(task.get("env", "mix"))

    @staticmethod
    def limits(options: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """The limits that each environment sets for itself."""
        return {
            name: {limit: spec[limit] for limit in LIMITS if limit in spec}
            for name, spec in options.get("envs", {}).items()
        }

    @property
    def resumed_by(self) -> Way:
        """How the task's environment is resumed; known once `reset` has returned."""
        return "none" if self._env is None else way_of(self._env)

    async def reset(self, task: Task, interrupted: Message | None = None) -> list[Message]:
        """Raises ValueError for a task of a source without an environment."""
        spec = self._envs.get(self.name_of(task))
        if spec is None:
            raise ValueError(
                f"task {task['id']!r} is for {task.get('env')!r}; env.options.envs has {', '.join(self._envs)}: add it"
            )
        self._env = functools.partial(_maker(spec, "env.options.envs"), **spec.get("options", {}))()
        self._weight = float(spec.get("reward_weight", 1.0))
        messages = await self._env.reset(task, **told(self._env, interrupted))
        self.tools, self.reset_state = self._env.tools, getattr(self._env, "reset_state", None)
        return messages

    async def step(self, message: Message) -> Turn:
        assert self._env is not None, "reset comes first"
        turn = await self._env.step(message)
        return dataclasses.replace(turn, reward=turn.reward * self._weight)

    async def snapshot(self) -> Snapshot | None:
        env: Any = self._env
        return await env.snapshot()  # type: ignore[no-any-return]

    async def restore(self, state: Snapshot) -> None:
        env: Any = self._env
        await env.restore(state)

    async def close(self) -> None:
        if self._env is not None:
            await self._env.close()


def _maker(spec: Mapping[str, Any], field: str) -> Callable[..., Env]:
    make: Callable[..., Env] = resolve(spec["name"], ENVIRONMENTS, f"{field}.name")
    return make
