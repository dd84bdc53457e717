"""Programs against tests, in the real sandbox."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asyncrl.rewards.sandbox import SandboxFailed
from asyncrl.rewards.scores.code_tests import CodeTests, read_tests
from tests.rewards.sandbox.test_sandbox import needs_namespaces

BOX = {"memory_mb": 256, "processes": 8, "concurrency": 2}
PROGRAMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
FUNCTION = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]
ADD = "def add(a, b):\n    return a + b\n"
SUMS = "a, b = map(int, input().split())\nprint(a + b)  \n\n"


def scored(code: str, truth: Any, **options: Any) -> dict[str, float]:
    score = CodeTests(sandbox=BOX, **{"timeout_s": 10.0, **options})
    return asyncio.run(score("", f"Here:\n```python\n{code}```\n", truth))


@needs_namespaces
def test_right_programs_pass_and_wrong_ones_do_not() -> None:
    assert scored(SUMS, json.dumps(PROGRAMS)) == {"score": 1, "has_code": 1, "passed": 1, "timed_out": 0}
    only_first = SUMS.replace("a + b", "3")
    assert scored(only_first, PROGRAMS)["score"] == 0
    assert scored(only_first, PROGRAMS, partial=True)["score"] == 0.5
    assert scored(only_first, PROGRAMS, max_tests=1)["score"] == 1


@needs_namespaces
def test_functions_and_asserts() -> None:
    assert scored(ADD, FUNCTION)["score"] == 1
    assert scored("class Solution:\n    def add(self, a, b): return a + b\n", FUNCTION)["score"] == 1
    assert scored(ADD, ASSERTS)["score"] == 1
    assert scored(ADD, "assert add(1, 1) == 2\nassert add(0, 0) == 0")["score"] == 1
    assert scored(ADD.replace("+", "*"), [*ASSERTS, "assert add(2, 2) == 4"], partial=True)["score"] == pytest.approx(
        1 / 3
    )


@needs_namespaces
@pytest.mark.system
def test_what_only_pretends_to_pass_does_not() -> None:
    for code in (
        "import sys; print('passed 0'); sys.exit(0)\n",
        "import os; os._exit(0)\n",
        "def add(a, b):\n    import os; os._exit(0)\n",
        "raise SystemExit\n",
        "",
    ):
        assert scored(code, ASSERTS)["score"] == 0, code
    late = scored("def add(a, b):\n    while b > 3: pass\n    return a + b\n", ASSERTS, partial=True, timeout_s=1.5)
    assert (late["score"], late["timed_out"]) == (0.5, 1)


def test_no_code_no_tests_no_sandbox() -> None:
    assert asyncio.run(CodeTests()("", "I would rather not.", ASSERTS))["has_code"] == 0
    for truth in (None, {}, {"inputs": ["1"], "outputs": []}, "", 3):
        with pytest.raises(ValueError, match="holds no tests"):
            read_tests(truth)
    down = CodeTests(sandbox={"url": "http://127.0.0.1:9", "retries": 0})
    with pytest.raises(SandboxFailed, match="gave no answer in 1 attempts"):
        asyncio.run(down("", "```\n1\n```", ASSERTS))
