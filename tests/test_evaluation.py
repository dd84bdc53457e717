from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.config.held_out import HeldOutSet
from asyncrl.errors import ConfigError, RunError
from asyncrl.evaluation import Played, by_source, evaluate, with_model
from asyncrl.success import pass_at, passes_at, success, wilson
from tests.learner.tiny import random_trajectory

SET = HeldOutSet("held_out", 9, 1, True, 1.0)


def earning(*rewards: float | None) -> list[object]:
    import numpy as np

    base = random_trajectory(0, 0, np.random.default_rng(0))
    return [
        None if r is None else dataclasses.replace(base, task_id=f"t{i}", reward=9.0, rewards={"success": r})
        for i, r in enumerate(rewards)
    ]


def test_success_counts_ones_of_the_named_reward_and_leaves_failures_out() -> None:
    found = success(earning(1.0, 0.0, 0.5, 1.0, None), "success")  # type: ignore[arg-type]
    assert (found.share, found.tasks, found.episodes, found.failed) == (0.5, 4, 4, 1)
    assert found.low < 0.5 < found.high
    assert "1 failed in their environment" in str(found)
    assert success(earning(0.0, 0.0), "another").share == 1.0, "without that name the whole reward counts"  # type: ignore[arg-type]


def test_samples_of_one_task_do_not_narrow_the_interval() -> None:
    ones = [dataclasses.replace(t, task_id="same") for t in earning(1.0, 1.0, 1.0, 1.0)]  # type: ignore[type-var]
    assert success(ones, "success").low == wilson(1.0, 1)[0]  # type: ignore[arg-type]


def test_pass_at_k_is_the_mean_over_all_ways_to_draw_k() -> None:
    for n, c in ((5, 2), (4, 0), (4, 4), (6, 1)):
        for k in range(1, n + 1):
            draws = list(itertools.combinations(range(n), k))
            share = sum(any(i < c for i in draw) for draw in draws) / len(draws)
            assert pass_at(k, n, c) == pytest.approx(share)
    assert passes_at([(4, 1), (4, 0), (1, 1)]) == {2: 0.25, 4: 0.5}, "a task with too few episodes is left out"
    assert passes_at([(1, 1)]) == {}


def test_each_data_source_is_told_apart() -> None:
    wins, losses = earning(1.0, 1.0), earning(0.0, None)  # type: ignore[arg-type]
    episodes = [Played("a", t) for t in wins] + [Played("b", t) for t in losses]  # type: ignore[arg-type]
    found = by_source([*episodes, Played("c", None)], SET)
    assert {source: (s.share, s.episodes, s.failed) for source, s in found.items()} == {
        "all": (2 / 3, 3, 2), "a": (1.0, 2, 0), "b": (0.0, 1, 1),
    }  # fmt: skip
    assert (found["a"].reward, found["a"].reward_half) == (9.0, 0.0)
    assert list(by_source(episodes[:2], SET)) == ["all"]


def test_all_failed_is_no_number() -> None:
    with pytest.raises(RunError, match="all 2 episodes failed"):
        success([None, None], "success")


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_wilson_holds_the_share_and_narrows(share: float) -> None:
    wide, narrow = wilson(share, 10), wilson(share, 1000)
    assert 0 <= wide[0] <= narrow[0] <= share <= narrow[1] <= wide[1] <= 1


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--checkpoint is .* no config\.json"):
        with_model(Config(), tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert with_model(Config(), tmp_path).model.path == str(tmp_path / "hf")


def test_servers_that_run_are_not_asked_in_the_name_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    servers = {"engine": "vllm_server", "engine_options": {"urls": ["http://127.0.0.1:9"]}}
    with pytest.raises(ConfigError, match="hold weights of their own"):
        with_model(Config.model_validate({"actors": servers}), tmp_path)


def test_nothing_to_play(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"eval\.tasks is 0"):
        evaluate(Config.model_validate({"eval": {"tasks": 0}}), tmp_path)


def test_held_out_tasks_are_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from asyncrl.quickstart.build import build_model
    from asyncrl.quickstart.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = Config.model_validate(
        {"eval": {"tasks": 4}, "env": {"max_tokens": 160, "max_turns": 2}, "actors": {"max_new_tokens": 8, "slots": 3}}
    )
    assert evaluate(config, tmp_path, tmp_path / "out.json") == 0
    said = capsys.readouterr().out
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["greedy"]["all"]["episodes"] == 4
    assert "0.0%" in said
    assert "4 episodes, 4 tasks" in said
    assert "greedy" in said
