"""Scores programs by tests, in a sandbox."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.rewards.sandbox import Result, Run, SandboxFailed, open_sandbox
from asyncrl.rewards.scores.answers import fenced


@dataclass(frozen=True, slots=True)
class Tests:
    """Either `inputs` and `outputs` (of the program, or of `function`), or `checks`."""

    __test__ = False

    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    function: str | None = None
    checks: tuple[str, ...] = ()
    """Statements that must not raise, run after the solution in its namespace."""


class CodeTests:
    """1 if the text's last fenced block passes all tests of `ground_truth`, else 0; or, with `partial`, the share.

    `ground_truth`, also as JSON: `{"inputs": [...], "outputs": [...]}` (stdin and stdout), the same with `fn_name`
    (arguments and result), a list of assert statements, or one text of them.
    """

    def __init__(
        self,
        *,
        sandbox: dict[str, Any] | None = None,
        timeout_s: float = 6.0,
        memory_mb: int = 512,
        partial: bool = False,
        max_tests: int = 16,
    ) -> None:
        """
        Args:
            sandbox: `{url: ...}` of a SandboxFusion service or `asyncrl sandbox`, or options of the local sandbox.
            timeout_s: of one run: a program and one input, or all checks of a function.
            memory_mb: of one run.
            max_tests: the first so many inputs are tried.
        """
        self._sandbox = open_sandbox(sandbox)
        self._timeout_s, self._memory_mb, self._partial, self._max = timeout_s, memory_mb, partial, max_tests

    async def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Metrics `has_code`, `passed` (share of the tests), `timed_out`.

        Raises SandboxFailed for an outage, ValueError when the ground truth holds no tests.
        """
        tests = read_tests(ground_truth)
        code = fenced(solution_str)
        if code is None:
            return {"score": 0.0, "has_code": 0.0, "passed": 0.0, "timed_out": 0.0}
        by_checks = tests.checks or tests.function
        passed, timed_out = await (self._checked(code, tests) if by_checks else self._programs(code, tests))
        share = sum(passed) / len(passed)
        score = share if self._partial else float(all(passed))
        return {"score": score, "has_code": 1.0, "passed": share, "timed_out": float(timed_out)}

    async def _programs(self, code: str, tests: Tests) -> tuple[list[bool], bool]:
        """Run the program once per input, concurrently as far as the sandbox allows."""
        pairs = list(zip(tests.inputs, tests.outputs, strict=True))[: self._max]
        results = await asyncio.gather(*(self._run(Run(code, stdin=str(given))) for given, _ in pairs))
        passed = [
            result.status == "Success" and result.run is not None and _lines(result.run.stdout) == _lines(str(wanted))
            for result, (_, wanted) in zip(results, pairs, strict=True)
        ]
        return passed, any(result.run and result.run.status == "TimeLimitExceeded" for result in results)

    async def _checked(self, code: str, tests: Tests) -> tuple[list[bool], bool]:
        """Run all checks in one process, which reports the result of each."""
        calls = [[given, wanted] for given, wanted in zip(tests.inputs, tests.outputs, strict=True)][: self._max]
        plan = {"function": tests.function, "calls": calls, "checks": tests.checks[: self._max]}
        # Read before the solution runs, so that printing "passed" and exiting does not pass.
        word = secrets.token_hex(16)
        files = {"solution.py": code.encode(), "tests.json": json.dumps(plan).encode()}
        result = await self._run(Run(_HARNESS, stdin=word, files=files))
        output = result.run.stdout if result.run else ""
        count = len(calls) or len(plan["checks"] or ())
        passed = {int(line.split()[1]) for line in output.splitlines() if line.startswith(word)}
        return [i in passed for i in range(count)], bool(result.run and result.run.status == "TimeLimitExceeded")

    async def _run(self, run: Run) -> Result:
        run = Run(run.code, "python", run.stdin, run.files, (), self._timeout_s, self._memory_mb)
        result = await self._sandbox.run(run)
        if result.status == "SandboxError":
            raise SandboxFailed(result.message)
        return result


_HARNESS = """
import json, sys
word = sys.stdin.readline().strip()
plan = json.load(open("tests.json"))
space = {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), space)
def plain(value):
    return json.loads(json.dumps(value))
def passes(i):
    if plan["function"] is None:
        exec(plan["checks"][i], space)
        return True
    function = space.get(plan["function"]) or getattr(space["Solution"](), plan["function"])
    given, wanted = plan["calls"][i]
    return plain(function(*given)) == wanted
for i in range(len(plan["calls"] or plan["checks"])):
    try:
        good = passes(i)
    except Exception as error:
        good = False
        print(f"check {i}: {type(error).__name__}: {error}", file=sys.stderr)
    if good:
        print(f"\\n{word} {i}", flush=True)
"""


def read_tests(ground_truth: Any) -> Tests:
    """The tests of a ground truth. Raises ValueError if it has none of the forms that `CodeTests` names."""
    if isinstance(ground_truth, str):
        try:
            parsed = json.loads(ground_truth)
        except ValueError:
            parsed = [ground_truth] if ground_truth.strip() else None
        ground_truth = parsed
    if isinstance(ground_truth, Mapping):
        inputs, outputs = ground_truth.get("inputs"), ground_truth.get("outputs")
        function = ground_truth.get("fn_name")
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0:
            return Tests(tuple(inputs), tuple(outputs), function)
        ground_truth = ground_truth.get("assert_case")
    if isinstance(ground_truth, Sequence) and ground_truth and all(isinstance(check, str) for check in ground_truth):
        return Tests(checks=tuple(ground_truth))
    raise ValueError(
        f"code_tests: the ground truth {ground_truth!r:.100} holds no tests: expected inputs and outputs of equal "
        "length, or assert statements"
    )


def _lines(text: str) -> list[str]:
    """The text without spaces at the ends of lines and empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().splitlines()
