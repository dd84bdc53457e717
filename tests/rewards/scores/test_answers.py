from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.plugins import resolve
from asyncrl.rewards import REWARDS, build, run_score


def value(name: str, solution: str, truth: Any, **options: Any) -> float:
    spec = {"name": name, "options": options}
    return asyncio.run(run_score(build(spec, "score"), {"ground_truth": truth}, solution)).value


@pytest.mark.parametrize(
    ("solution", "truth", "strict", "flexible"),
    [
        ("so 3+4\n#### 7", "7", 1, 1),
        ("#### $1,234.00", "1234", 1, 1),
        ("#### 7 and then #### 8.", "8", 1, 1),
        ("the answer is 7.", "7", 0, 1),
        ("7 then 8", "7", 0, 0),
        ("#### -3", "He lost 3. #### -3", 1, 1),
        ("nothing", "7", 0, 0),
        ("#### 7" + "x" * 300, "7", 0, 0),
        ("", "7", 0, 0),
    ],
)
def test_gsm8k(solution: str, truth: str, strict: float, flexible: float) -> None:
    assert value("gsm8k", solution, truth) == strict
    assert value("gsm8k", solution, truth, method="flexible") == flexible


def test_gsm8k_refuses_a_truth_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="the ground truth 'seven' is not a number"):
        value("gsm8k", "#### 7", "seven")


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("The answer is (B).", 1),
        ("**Answer: B**", 1),
        (r"Thus \boxed{B}", 1),
        (r"Thus \boxed{\text{B}}", 1),
        ("B", 1),
        ("Answer: A. No. Answer: B", 1),
        ("The answer is B because birds are", 1),
        ("the answer is (b) as said", 1),
        ("The answer is a tricky one. Answer: B", 1),
        ("Answer: B. The answer is a bird", 1),
        ("Answer: A", 0),
        ("Because A bird is black", 0),
        ("", 0),
    ],
)
def test_multiple_choice(solution: str, score: float) -> None:
    assert value("multiple_choice", solution, "B") == score


def test_words() -> None:
    assert value("exact_match", " The  Eiffel Tower!", ["Louvre", "eiffel tower"]) == 1
    assert (
        value("exact_match", "x <answer>a</answer> <answer>Eiffel Tower</answer> y", "eiffel tower", tag="answer") == 1
    )
    assert value("exact_match", "Eiffel Tower", "eiffel tower", tag="answer") == 0
    assert value("exact_match", "Paris", {"target": ["paris"]}) == 1
    assert value("f1", "the big Eiffel tower", ["eiffel tower"]) == pytest.approx(0.8)
    assert value("f1", "", "x") == 0
    with pytest.raises(ValueError, match="the ground truth is None"):
        value("f1", "x", None)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ('{"n": 1}', 1),
        ('Here:\n```json\n{"n": 1}\n```\n', 1),
        ('{"n": "1"}', 0),
        ("{}", 0),
        ("no json", 0),
        ("[" * 100_000, 0),
    ],
)
def test_json_schema(solution: str, score: float) -> None:
    assert value("json_schema", solution, SCHEMA) == score
    assert value("json_schema", solution, None, schema=SCHEMA) == score


def test_mathematics() -> None:
    async def values() -> list[float]:
        check = build({"name": "math", "options": {"timeout_s": 60.0, "processes": 1}}, "score")
        cases = [
            (r"so $\boxed{\frac{1}{2}}$", "0.5"),
            (r"\boxed{2x+x}", "3x"),
            (r"\boxed{(1,3)}", "(1, 3)"),
            (r"\boxed{7}", "8"),
            ("I do not know", "8"),
        ]
        return [(await run_score(check, {"ground_truth": truth}, text)).value for text, truth in cases]

    assert asyncio.run(values()) == [1, 1, 1, 0, 0]


def test_every_score_says_what_it_does() -> None:
    assert all((resolve(name, REWARDS, "score").__doc__ or "").strip() for name in REWARDS)
