"""The real package: questions without end, scored by it."""

from __future__ import annotations

import asyncio

import msgpack
import pytest

from asyncrl.data.sources.reasoning_gym import ReasoningGymSource
from asyncrl.errors import ConfigError
from asyncrl.rewards import build, run_score


def test_tasks_follow_from_the_seed_and_are_scored_by_the_package() -> None:
    options = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}, "held_out_size": 5}
    source = ReasoningGymSource(seed=1, **options)
    task = source.task(7)
    assert task == ReasoningGymSource(seed=1, **options).task(7)
    assert task != ReasoningGymSource(seed=2, **options).task(7)
    assert source.train_size is None
    assert not {source.held_out(i)["prompt"] for i in range(5)} & {source.task(i)["prompt"] for i in range(200)}
    carried = msgpack.unpackb(msgpack.packb(task))
    score = build("reasoning_gym", "score")
    right, wrong = f"<answer>{task['ground_truth']}</answer>", "<answer>no idea</answer>"
    found = [asyncio.run(run_score(score, carried, text)) for text in (right, str(task["ground_truth"]), wrong)]
    assert [f.value for f in found] == [1, 1, 0]
    assert [f.metrics["answered"] for f in found] == [1, 0, 1]


def test_what_the_package_refuses_is_a_config_error() -> None:
    for options, said in (
        ({"dataset": "chain_sums"}, "dataset is 'chain_sums'"),
        ({"dataset": "chain_sum", "config": {"terms": 2}}, r"with config \{'terms': 2\}"),
        ({"dataset": "chain_sum", "config": {"min_terms": 9, "max_terms": 2}}, "which reasoning-gym refuses"),
    ):
        with pytest.raises(ConfigError, match=said):
            ReasoningGymSource(**options)
