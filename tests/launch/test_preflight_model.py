from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.config.shipped import names
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import check_model
from asyncrl.model import resolve_path


def folder(path: Path, config: str) -> Path:
    (path / "config.json").write_text(config)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_an_episode_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    model = folder(tmp_path, json.dumps({"max_position_embeddings": 256}))
    check_model(Config(model={"path": str(model)}, env={"max_tokens": 256}))
    with pytest.raises(ConfigError, match=r"env\.max_tokens is 257 but the model has 256 positions"):
        check_model(Config(model={"path": str(model)}, env={"max_tokens": 257}))
    with pytest.raises(ConfigError, match=r"env\.max_tokens is 100000 but the model has"):
        check_model(Config(env={"max_tokens": 100_000}))


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
        check_model(Config(model={"path": str(folder(tmp_path, "{"))}))


@pytest.mark.parametrize("check", [check_model, lambda config: resolve_path(config.model)])
def test_a_path_where_nothing_is_is_no_hub_name(check) -> None:
    with pytest.raises(ConfigError, match=r"model\.path is './nowhere', and there is no such folder"):
        check(Config(model={"path": "./nowhere"}))


def test_the_configurations_that_come_with_asyncrl_fit_their_models() -> None:
    of_quickstart = [c for c in map(Config.load, names()) if c.model.path == "quickstart"]
    assert len(of_quickstart) > 5
    for config in of_quickstart:
        check_model(config)
