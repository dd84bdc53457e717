from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import Config

TEXT = """
model: {path: ./model}
data: {source: json_lines, options: {path: tasks.jsonl, held_out_path: ../held.jsonl}}
env:
  name: single_turn
  options: {score: [{name: "rewards.py:score", weight: 2}, {name: "package.module:score"}], text: tasks.jsonl}
"""


def test_files_of_a_config_are_found_beside_it_then_where_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "project" / "configs", tmp_path / "elsewhere"
    (here / "model").mkdir(parents=True)
    elsewhere.mkdir()
    for file in (here / "tasks.jsonl", here.parent / "held.jsonl", here / "rewards.py", elsewhere / "tasks.jsonl"):
        file.touch()
    (elsewhere / "other.py").touch()
    config = here / "config.yaml"
    config.write_text(TEXT)
    monkeypatch.chdir(elsewhere)
    found = Config.load(config, {"env.name": "other.py:Env"})
    assert found.model.path == str(here / "model")
    assert found.data.options == {"path": str(here / "tasks.jsonl"), "held_out_path": str(here.parent / "held.jsonl")}
    assert found.env.name == f"{elsewhere / 'other.py'}:Env"
    assert found.env.options["score"][0]["name"] == f"{here / 'rewards.py'}:score"
    assert found.env.options["score"][1]["name"] == "package.module:score"
    assert found.env.options["text"] == "tasks.jsonl", "no path by its name"
    flag = Config.load(config, {"data.options": {"path": "tasks.jsonl"}})
    assert flag.data.options["path"] == str(elsewhere / "tasks.jsonl")


def test_what_is_found_nowhere_stays_a_name_and_a_pattern_is_a_path(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("data: {source: datasets, options: {path: openai/gsm8k, held_out_path: 'part-*.parquet'}}")
    (tmp_path / "part-0.parquet").touch()
    options = Config.load(config, {}).data.options
    assert options == {"path": "openai/gsm8k", "held_out_path": str(tmp_path / "part-*.parquet")}
