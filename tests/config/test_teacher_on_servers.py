"""What is refused of `learner.teacher.scored_by: servers`, and which processes it brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.chaos.plan import targets
from asyncrl.config import Config
from asyncrl.config.resuming import change, settings
from asyncrl.config.teacher import scorer_names, words_scored
from asyncrl.errors import ConfigError
from asyncrl.launch.origins import _check_words
from asyncrl.launch.placement.demand import demand
from asyncrl.launch.placement.resources import role_names
from asyncrl.launch.roles import roles
from asyncrl.launch.supervision.shutdown import Running, Shutdown, Stop
from asyncrl.run_folder import RunFolder

SERVERS: dict[str, Any] = {
    "path": "quickstart", "scored_by": "servers", "servers": ["http://t:8000"], "over": "top_k", "k": 5
}  # fmt: skip


def config(teacher: dict[str, Any] | None = None, **sections: Any) -> Config:
    learner = {"teacher": SERVERS | (teacher or {})} | sections.pop("learner", {})
    return Config.model_validate({"learner": learner, **sections})


@pytest.mark.parametrize(
    ("teacher", "sections", "why"),
    [
        ({"servers": []}, {}, r"learner\.teacher\.servers is empty: name the URLs"),
        ({"servers": ["gpu-7:8000"]}, {}, r"names 'gpu-7:8000', expected http://host:port"),
        ({"over": "vocabulary"}, {}, r"over is vocabulary and learner\.teacher\.scored_by servers.*set over top_k"),
        ({"top_k_of": "student"}, {}, r"top_k_of is student .*set top_k_of teacher"),
        ({"k": 2000}, {}, r"learner\.teacher\.k is 2000, expected at most 1024"),
        ({"k": 512}, {"env": {"max_tokens": 65536}}, r"the scores of one group may have \d+ bytes .*lower one of them"),
        ({}, {"actors": {"temperature": 0.7}}, r"actors\.temperature is 0\.7 .*set actors\.temperature 1"),
        ({"scored_by": "learner"}, {}, r"servers is set and learner\.teacher\.scored_by is learner"),
        ({"path": ""}, {}, r"learner\.teacher\.\w+ is set and learner\.teacher\.path is empty"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(teacher: Any, sections: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){why}"):
        config(teacher, **sections)


def test_the_words_that_are_asked_for() -> None:
    assert words_scored(config()) == 5
    assert words_scored(config({"over": "token"})) == 0
    assert words_scored(Config()) == 0


def test_the_scorers_are_processes_like_others(tmp_path: Path) -> None:
    two = config({"scorers": 2}, launch={"gpus": {"scorer": 0}})
    assert scorer_names(two) == ["scorer-0", "scorer-1"]
    assert scorer_names(Config()) == []
    assert [name for name in role_names(two) if name.startswith("scorer")] == ["scorer-0", "scorer-1"]
    started = [role.name for role in roles(RunFolder(tmp_path), two, resume=False)]
    assert started == role_names(two)
    assert demand("scorer-1", two).gpus == 0
    assert targets("scorer", started) == ["scorer-0", "scorer-1"]
    left = [Running("scorer-0", "scorer"), Running("buffer", "buffer")]
    assert Shutdown(5.0, 0.0).plan(0.0, left, 0) == [Stop("scorer-0")]


def test_what_resume_makes_of_its_fields() -> None:
    kinds = {name: change(f"learner.teacher.{name}") for name in ("path", "scored_by", "servers", "dialect", "k")}
    assert kinds == {"path": "refused", "scored_by": "refused", "servers": "free", "dialect": "free", "k": "branch"}
    assert settings(config()) == settings(config({"servers": ["http://other:1"]}))


@pytest.mark.parametrize("option", ["--resume", "--fork"])
def test_more_words_than_the_stored_scores_have_are_refused(option: str) -> None:
    for before, now in ((config(), config({"k": 6})), (config({"over": "token"}), config())):
        with pytest.raises(ConfigError, match=rf"number cannot rise with {option}"):
            _check_words(before, now, option)
        _check_words(now, before, option)
