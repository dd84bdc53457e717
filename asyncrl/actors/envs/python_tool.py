"""An environment whose policy may run Python in the sandbox; its final text is scored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.actors.envs.tool_env import ToolEnvironment
from asyncrl.rewards import ScoreSpec
from asyncrl.rewards.sandbox import Run, SandboxFailed, open_sandbox


class PythonToolEnv(ToolEnvironment):
    """Each call of `python` is a new process: nothing is kept between calls."""

    state_fields = ()

    def __init__(
        self,
        score: ScoreSpec = "exact_match",
        *,
        sandbox: dict[str, Any] | None = None,
        timeout_s: float = 6.0,
        max_turns: int | None = None,
        max_tool_chars: int = 4000,
    ) -> None:
        """
        Args:
            score, max_turns, max_tool_chars: as in ToolEnvironment.
            sandbox: `{url: ...}` of a SandboxFusion service or `asyncrl sandbox`, or options of the local sandbox.
            timeout_s: deadline of one run.
        """
        self._sandbox, self._timeout_s = open_sandbox(sandbox), timeout_s
        # A call may wait for its turn in the sandbox; only a sandbox that hangs exceeds this deadline.
        super().__init__(
            (self.python,),
            score,
            max_turns=max_turns,
            tool_timeout_s=10 * timeout_s + 30,
            max_tool_chars=max_tool_chars,
        )

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raises ValueError for a score or a sandbox that cannot work."""
        ToolEnvironment.check(options)
        open_sandbox(options.get("sandbox"))

    async def python(self, code: str) -> str:
        """Run Python code and read what it prints. Every call starts anew; there is no network.

        Args:
            code: a whole program; print what you want to see
        """
        result = await self._sandbox.run(Run(code, run_timeout=self._timeout_s))
        if result.status == "SandboxError" or result.run is None:
            raise SandboxFailed(result.message)
        output = result.run.stdout + (f"\n{result.run.stderr[-1500:]}" if result.run.stderr else "")
        if result.status == "Failed":
            output += f"\n[{result.message}]"
        return output.strip() or "[nothing was printed]"
