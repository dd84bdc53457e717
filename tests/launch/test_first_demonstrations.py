"""Some demonstrations are rendered before anything starts: the first, the longest, one of each sequence of roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.data.demonstrations import open_demonstrations
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.first_demonstrations import FIRST, LONGEST, check_demonstrations, chosen
from tests.data.demonstrations.chats import said, turns, written


def config(path: str) -> Config:
    return Config.load(None, {"data.demonstrations": path})


def test_the_first_the_longest_and_one_of_each_kind_are_looked_at(tmp_path: Path) -> None:
    chats = [turns(2 * n) for n in range(150)]
    chats[100] = {"messages": [said("user", "x" * 90), said("assistant", "y" * 3000)]}
    chats[140] = {"messages": [said("system", "s"), said("user", "x"), said("assistant", "y")]}
    data = open_demonstrations(config(written(tmp_path / "chats.jsonl", chats)))
    assert data is not None
    rows = chosen(data)
    assert {*range(FIRST), 100, 140} <= set(rows)
    assert len(rows) <= FIRST + LONGEST + 3


def test_a_row_that_the_model_cannot_take_stops_the_launch(tmp_path: Path) -> None:
    chats = [turns(2 * n) for n in range(60)]
    check_demonstrations(config(written(tmp_path / "good.jsonl", chats)))
    chats[50] = {"messages": [said("user", "x" * 300), said("assistant", "y")]}
    with pytest.raises(ConfigError, match=r"bad\.jsonl line 51 cannot be trained on: it has 3\d\d tokens .* 256 posit"):
        check_demonstrations(config(written(tmp_path / "bad.jsonl", chats)))


def test_a_role_that_the_chat_template_does_not_know_stops_the_launch(tmp_path: Path) -> None:
    chats = [turns(2 * n) for n in range(60)]
    chats[55] = {"messages": [said("human", "x"), said("assistant", "y")]}
    with pytest.raises(ConfigError, match=r"bad\.jsonl line 56 .* has the role 'human', .*: write user"):
        check_demonstrations(config(written(tmp_path / "bad.jsonl", chats)))


def test_without_demonstrations_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.launch.checks.first_demonstrations.build_renderer", None)
    check_demonstrations(Config())
