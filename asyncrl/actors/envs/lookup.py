"""The quickstart's environment: a store and a calculator behind tool calls (tasks: asyncrl/data/sources/lookup.py)."""

from __future__ import annotations

import asyncio
import math
import random

from asyncrl.actors.envs.calculator import calculate
from asyncrl.actors.envs.protocol import Message, Task
from asyncrl.actors.envs.tool import ToolError
from asyncrl.actors.envs.tool_env import ToolEnvironment
from asyncrl.errors import ConfigError


class LookupEnv(ToolEnvironment):
    """Reward 1 when the final text is exactly the task's answer, else 0."""

    state_fields = ()

    def __init__(
        self, *, max_turns: int | None = None, tool_latency_s: float | str = 0.0, tool_timeout_s: float = 30.0
    ) -> None:
        """
        Args:
            max_turns: as in ToolEnvironment.
            tool_latency_s: duration of each tool call: seconds, or `lognormal:mean,sigma` for a long tail (`mean` in
                seconds; drawn per call, seeded by the task and the episode's index in its group).
            tool_timeout_s: deadline of one call.
        Raises ConfigError for a `tool_latency_s` of another form.
        """
        super().__init__((self.lookup, self.calculate), max_turns=max_turns, tool_timeout_s=tool_timeout_s)
        self._latency = _parse_latency(tool_latency_s)
        self._rng: random.Random | None = None

    async def reset(self, task: Task) -> list[Message]:
        self._rng = None
        return await super().reset(task)

    async def score(self, solution: str) -> tuple[float, dict[str, float]]:
        success = float(solution.strip() == self.task["answer"])
        return success, {"success": success}

    async def lookup(self, key: str) -> str:
        """Look up a key in the store.

        Args:
            key: the word to look up
        """
        await self._wait()
        store = self.task["store"]
        if key not in store:
            raise ToolError(f"no key {key}")
        return str(store[key])

    async def calculate(self, expression: str) -> str:
        """Work out an arithmetic expression.

        Args:
            expression: e.g. "41 - 17"
        """
        await self._wait()
        return await calculate(expression)

    async def _wait(self) -> None:
        mean_s, sigma = self._latency
        if mean_s > 0:
            if self._rng is None:
                self._rng = random.Random(f"{self.task['id']}/{self.task.get('episode', 0)}")
            # exp(N(mu, sigma)) has mean exp(mu + sigma^2 / 2); sigma 0 is a constant.
            await asyncio.sleep(self._rng.lognormvariate(math.log(mean_s) - sigma**2 / 2, sigma))


def _parse_latency(spec: float | str) -> tuple[float, float]:
    """(mean in seconds, sigma of the logarithm)."""
    text = str(spec)
    kind, _, numbers = text.rpartition(":")
    try:
        mean_s, sigma = (float(part) for part in numbers.split(",")) if kind else (float(text), 0.0)
    except ValueError:
        mean_s = sigma = math.nan
    if kind not in ("", "lognormal") or not (0 <= mean_s < math.inf and 0 <= sigma < math.inf):
        raise ConfigError(
            f"env.options.tool_latency_s is {spec!r}; expected seconds >= 0 or `lognormal:mean,sigma`, "
            "e.g. lognormal:0.2,1.0"
        )
    return mean_s, sigma
