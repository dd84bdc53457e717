"""Scores: verl's signature, what is put around them, what a config says about them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.rewards import build, parse, run_score
from asyncrl.rewards.group_score import GroupAnswer, open_group_score
from asyncrl.rewards.isolation.processes import InProcesses
from asyncrl.rewards.wrappers import Batched, Bucket, OverlongPenalty, RateLimited
from tests.children import children
from tests.rewards import verl_rewards
from tests.waiting import until

FILE = str(Path(__file__).with_name("verl_rewards.py"))
TASK = {"id": "t", "prompt": "1+1?", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "2"}}


def score(spec: Any, solution: str, task: dict[str, Any] = TASK, tokens: int | None = None) -> Any:
    return asyncio.run(run_score(build(spec, "env.options.score"), task, solution, tokens))


def test_verls_function_is_taken_as_it_is_and_its_numbers_become_metrics() -> None:
    found = score(f"{FILE}:compute_score", "2")
    assert (found.value, found.metrics, found.parts) == (1.0, {"length": 1.0}, {})
    options = {"name": f"{FILE}:with_options", "options": {"bonus": 0.5}}
    assert score(options, "2", {**TASK, "extra_info": {"k": 2}}).value == 3.5
    assert score(f"{FILE}:with_options", "2", {**TASK, "extra_info": None}).value == 1.0
    assert score(f"{FILE}:length_and_task", "", {**TASK, "k": 4}, tokens=3).value == 7.0


def test_several_are_a_weighted_sum_and_keep_their_names() -> None:
    spec = [
        {"name": "exact_match", "weight": 2},
        {"name": f"{FILE}:compute_score", "weight": -0.5, "label": "verl"},
    ]
    found = score(spec, "2")
    assert found.value == 1.5
    assert found.parts == {"exact_match": 1.0, "verl": 1.0}
    assert found.metrics == {"verl/length": 1.0}
    assert build(spec, "x") is build(list(spec), "x"), "one object per process, or limits would not be shared"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsmk8", r"score: 'gsmk8' is not a known name \(did you mean 'gsm8k'\?\).*path/to/file\.py:Name"),
        ({"name": "gsm8k", "options": {"method": "lax"}}, r"score\.options\.method: 'lax' does not suit gsm8k"),
        ({"name": "gsm8k", "options": {"solution_str": ""}}, "is passed to gsm8k by asyncrl itself"),
        ({"name": "gsm8k", "method": "strict"}, r"score\.method: no such field.*go into `options`"),
        ([{"name": "f1"}, {"name": "f1"}], "two scores called 'f1'"),
        ([], "is empty"),
        ({"name": "f1", "weight": "2"}, "weight is '2': expected a number"),
        ({"name": "f1", "wrap": ["in_process"]}, r"score\.wrap\[0\]: 'in_process' is not a known name"),
        (
            {"name": "f1", "wrap": [{"name": "batched", "sice": 2}]},
            r"score\.wrap\[0\]\.sice: Batched has no such option",
        ),
        ([3], r"score\[0\] is 3: expected a name, or a mapping"),
    ],
)
def test_a_bad_spec_is_refused_by_name(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec, "env.options.score")


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (float("nan"), ValueError, "returned nan; expected a finite number"),
        ({"score": float("inf")}, ValueError, "returned inf"),
        ("1", TypeError, "returned str"),
        ({"reward": 1}, TypeError, "without `score`"),
        ({"score": None}, TypeError, "returned None as `score`"),
    ],
)
def test_what_is_no_number_is_an_error_never_a_reward(result: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        score(lambda **columns: result, "2")


def narrow(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def verbose(solution_str: str, **others: Any) -> float:
    assert set(others) == {"data_source", "ground_truth", "extra_info"}
    return 1.0


@pytest.mark.parametrize("score", [narrow, InProcesses(narrow), verbose])
def test_a_function_gets_the_columns_that_it_names(score: Any) -> None:
    assert asyncio.run(run_score(score, {"prompt": "?", "ground_truth": "7"}, "7")).value == 1.0


def test_a_parameter_that_nobody_gives_is_named(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("def score(completions, **kwargs): ...")
    with pytest.raises(ValueError, match=r"parameter 'completions'.*data_source, solution_str, ground_truth"):
        parse(f"{tmp_path}/theirs.py:score", "env.options.score")


def test_a_group_score_may_be_an_object_that_is_called_as_a_plain_function(tmp_path: Path) -> None:
    (tmp_path / "compares.py").write_text(
        "class Compare:\n    def __init__(self, factor=1): self.factor = factor\n"
        "    def __call__(self, task, answers): return [self.factor * len(a.text) for a in answers]\n"
    )
    env = {"group_score": f"{tmp_path}/compares.py:Compare", "group_score_options": {"factor": 2}}
    score = open_group_score(Config.model_validate({"env": env}))
    assert score is not None
    answer = GroupAnswer([{"role": "assistant", "content": "yes"}], 0.0, {})
    assert asyncio.run(score({"id": "1", "prompt": "?"}, [answer])) == [6]


def test_hanging_and_dying_scores_cost_their_own_episode_only() -> None:
    others = children("asyncrl.rewards.isolation.worker")
    wrapped = InProcesses(verl_rewards.compute_score, timeout_s=1.0, processes=2)

    async def all_of(*solutions: str) -> list[Any]:
        return await asyncio.gather(*(run_score(wrapped, TASK, s) for s in solutions), return_exceptions=True)

    first = asyncio.run(all_of("2"))
    assert (first[0].value, first[0].metrics) == (1.0, {"length": 1.0})
    hang, died, raised, nan, right, wrong = asyncio.run(all_of("hang", "die", "raise", "nan", "2", "3"))
    assert isinstance(hang, TimeoutError)
    assert "did not return within 1.0 s (in_processes.timeout_s)" in str(hang)
    assert "its process died" in str(died)
    assert "ValueError: no such answer" in str(raised)
    assert "returned nan" in str(nan)
    assert (right.value, wrong.value) == (1.0, 0.0)
    few = lambda: len(children("asyncrl.rewards.isolation.worker") - others) <= 2  # noqa: E731
    assert until(few), "killed workers are gone; at most one idle one per slot is left"


def test_in_processes_says_what_it_cannot_find_again() -> None:
    with pytest.raises(ValueError, match="function at the top level of a file"):
        InProcesses(lambda **columns: 1.0)


def test_batched_scores_concurrent_calls_together() -> None:
    sizes: list[int] = []

    def many(solution_strs: list[str], **columns: list[Any]) -> list[float]:
        sizes.append(len(solution_strs))
        if "bad" in solution_strs:
            raise RuntimeError("down")
        return [float(s) for s in solution_strs] if "short" not in solution_strs else []

    batched = Batched(many, size=4, wait_s=0.02)

    async def all_of(*solutions: str) -> list[Any]:
        return await asyncio.gather(*(run_score(batched, TASK, s) for s in solutions), return_exceptions=True)

    assert [found.value for found in asyncio.run(all_of(*"123456"))] == [1, 2, 3, 4, 5, 6]
    assert sizes == [4, 2]
    assert [str(found) for found in asyncio.run(all_of("1", "bad"))] == ["down", "down"]
    assert "returned 0 results for 2" in str(asyncio.run(all_of("1", "short"))[0])
    verl = {"name": f"{FILE}:compute_scores", "wrap": [{"name": "batched", "size": 2, "wait_s": 0.01}]}
    assert score(verl, "2").value == 11.0


def test_a_bucket_spreads_what_comes_at_once() -> None:
    bucket = Bucket(per_minute=120)
    assert [bucket.take(1, 0.0) for _ in range(20)] == [0.0] * 20
    assert [bucket.take(1, 0.0) for _ in range(2)] == [0.5, 1.0]
    assert bucket.take(1, 100.0) == 0.0
    assert bucket.take(60, 100.0) > 0


def test_rate_limits_hold_requests_tokens_and_concurrency() -> None:
    running, most, slept = 0, 0, []

    async def ask(**columns: Any) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return 1.0

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def run(n: int, **limits: Any) -> None:
        limited = RateLimited(ask, clock=lambda: 0.0, sleep=sleep, **limits)
        await asyncio.gather(*(run_score(limited, TASK, "x" * 396) for _ in range(n)))

    asyncio.run(run(8, concurrency=3))
    assert (most, slept) == (3, [])
    asyncio.run(run(12, requests_per_minute=60))
    assert slept == [1.0, 2.0]
    slept.clear()
    asyncio.run(run(3, tokens_per_minute=600))
    assert slept == [10.0, 20.0], "100 tokens a call, ten a second"


def test_overlong_penalty_is_dapos() -> None:
    spec = {
        "name": "exact_match",
        "wrap": [{"name": "overlong_penalty", "max_tokens": 100, "buffer_tokens": 20, "factor": 0.5}],
    }
    for tokens, penalty in ((10, 0.0), (80, 0.0), (90, -0.25), (100, -0.5), (120, -1.0)):
        found = score(spec, "2", tokens=tokens)
        assert found.value == 1 + penalty
        assert found.metrics["overlong_penalty"] == penalty
    with pytest.raises(ValueError, match="does not count the tokens"):
        score(spec, "2")
    with pytest.raises(ValueError, match="buffer_tokens is 0"):
        OverlongPenalty(lambda: 0, max_tokens=10, buffer_tokens=0)


def test_wrappers_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {
        "name": f"{FILE}:compute_scores",
        "weight": 0.5,
        "label": "many",
        "wrap": [
            {"name": "in_processes", "timeout_s": 20.0, "processes": 1},
            {"name": "batched", "size": 1},
            {"name": "rate_limited", "concurrency": 2},
        ],
    }
    found = score(spec, "2")
    assert (found.value, found.parts) == (5.5, {"many": 11.0})


def test_the_environment_fails_its_episode_when_its_score_does() -> None:
    from asyncrl.actors.envs.single_turn import SingleTurnEnv

    async def episode(solution: str) -> Any:
        env = SingleTurnEnv([{"name": f"{FILE}:compute_score", "weight": 2.0}])
        await env.reset(TASK)
        return await env.step({"role": "assistant", "content": solution, "tokens": 1})

    turn = asyncio.run(episode("2"))
    assert (turn.reward, turn.rewards, turn.done) == (2.0, {"compute_score": 1.0}, True)
    for solution in ("raise", "nan"):
        with pytest.raises(ValueError, match=r"no such answer|returned nan"):
            asyncio.run(episode(solution))


def test_a_bad_score_is_refused_before_anything_starts() -> None:
    from asyncrl.config import Config
    from asyncrl.errors import ConfigError
    from asyncrl.launch.preflight import check_names

    for name in ("single_turn", "tools"):
        env = {"name": name, "options": {"score": [{"name": "gsm8k", "wieght": 1}]}}
        with pytest.raises(ConfigError, match=r"env\.options\.score\[0\]\.wieght: no such field"):
            check_names(Config.model_validate({"env": env}))
    check_names(Config.model_validate({"env": {"name": "single_turn", "options": {"score": "gsm8k"}}}))
    judge = {"name": "judge", "options": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": "NOT_SET"}}
    tests = {"name": "code_tests", "options": {"sandbox": {"memory": 3}}}
    over = {"name": "f1", "wrap": [{"name": "overlong_penalty", "max_tokens": 5, "buffer_tokens": 9}]}
    for name, options, said in (
        ("single_turn", {"score": judge}, r"score: judge: judge\.api_key_env is 'NOT_SET'"),
        ("single_turn", {"score": tests}, r"score: code_tests: sandbox\.memory: LocalSandbox has no such option"),
        ("single_turn", {"score": over}, r"score: f1: buffer_tokens is 9, expected 1 to max_tokens = 5"),
        ("python_tool", {"sandbox": {"memory": 3}}, r"sandbox\.memory: LocalSandbox has no such option"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_names(Config.model_validate({"env": {"name": name, "options": options}}))
