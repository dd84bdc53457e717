"""Mathematical equality, by the package math-verify (extra `rewards`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.rewards.isolation.processes import InProcesses


class Math:
    """1 if the text's last \\boxed{} (or last expression) equals the truth as mathematics, else 0."""

    def __init__(self, *, timeout_s: float = 10.0, processes: int = 2) -> None:
        """`timeout_s`, of one call, and `processes`, as in `in_processes`: simplifying an expression may take forever,
        so it runs where it can be killed."""
        # The import takes seconds. Within the time of a call it would make right answers wrong ones.
        self._check = InProcesses(equal, timeout_s=timeout_s, processes=processes, imports=("math_verify",))

    async def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return await self._check(solution_str=solution_str, ground_truth=str(ground_truth))
        except TimeoutError:
            # An expression that cannot be simplified in time is a wrong answer, not an outage.
            return {"score": 0.0, "answered": 1.0, "timed_out": 1.0}


def equal(solution_str: str, ground_truth: str) -> dict[str, float]:
    """`score`: 1 if both are equal, else 0; `answered`: 1 if an expression was found. Raises ValueError if the ground
    truth is not mathematics."""
    from math_verify import parse, verify

    truth = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None) or parse(ground_truth, parsing_timeout=None)
    if not truth:
        raise ValueError(f"math: the ground truth {ground_truth!r} is not a mathematical expression")
    answer = parse(solution_str, parsing_timeout=None)
    same = bool(answer) and bool(verify(truth, answer, timeout_seconds=None))
    return {"score": float(same), "answered": float(bool(answer))}
