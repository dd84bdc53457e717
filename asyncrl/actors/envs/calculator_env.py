"""A question, a calculator, and a score of the final answer: the smallest agent."""

from __future__ import annotations

from asyncrl.actors.envs.calculator import calculate
from asyncrl.actors.envs.tool_env import ToolEnv
from asyncrl.rewards import ScoreSpec


class CalculatorEnv(ToolEnv):
    """The policy may call `calculate` as often as it has turns; its final text is scored."""

    def __init__(
        self, score: ScoreSpec = "exact_match", *, max_turns: int | None = None, tool_timeout_s: float = 30.0
    ) -> None:
        """As in `tools`."""
        super().__init__((calculate,), score, max_turns=max_turns, tool_timeout_s=tool_timeout_s)
