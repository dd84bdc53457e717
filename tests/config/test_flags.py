"""Each config field is a flag, read through tyro as the command line reads it."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import Any

import pytest
import tyro

from asyncrl.config import Config
from asyncrl.config.flags import flags_type, given_flags, option_flags, unknown_flag
from asyncrl.config.loading import fields, load
from asyncrl.config.meanings import meaning
from asyncrl.errors import ConfigError


def given(*words: str) -> dict[str, Any]:
    return given_flags(tyro.cli(flags_type(), args=list(words)))


def test_nothing_given_is_nothing() -> None:
    assert given() == {}


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--buffer.max-staleness", "2"], "buffer.max_staleness", 2),
        (["--buffer.max_staleness", "2"], "buffer.max_staleness", 2),
        (["--buffer.max-staleness=2"], "buffer.max_staleness", 2),
        (["--learner.lr", "1e-5"], "learner.lr", 1e-5),
        (["--learner.entropy-coef", "-0.1"], "learner.entropy_coef", -0.1),
        (["--learner.unsafe"], "learner.unsafe", True),
        (["--learner.unsafe", "false"], "learner.unsafe", False),
        (["--launch.name", "5"], "launch.name", "5"),
        (["--launch.name", "none"], "launch.name", None),
        (["--buffer.fsync", "off"], "buffer.fsync", "off"),
        (["--env.options", '{"tool_latency_s": 0.1}'], "env.options", {"tool_latency_s": 0.1}),
        (["--env.options", "{tool_latency_s: 0.1}"], "env.options", {"tool_latency_s": 0.1}),
        (["--buffer.filters", "zero_variance", "too_long"], "buffer.filters", ["zero_variance", "too_long"]),
        (["--buffer.filters", "[zero_variance]"], "buffer.filters", ["zero_variance"]),
        (["--buffer.filters"], "buffer.filters", []),
        (["--learner.betas", "0.8", "0.9"], "learner.betas", [0.8, 0.9]),
        (["--learner.lora.r", "8"], "learner.lora.r", 8),
        (["--learner.lora.target-modules", "q_proj", "v_proj"], "learner.lora.target_modules", ["q_proj", "v_proj"]),
        (["--learner.corrections", "{name: a}", "{name: b}"], "learner.corrections", [{"name": "a"}, {"name": "b"}]),
        (["--learner.corrections", '[{"name": "tis"}]'], "learner.corrections", [{"name": "tis"}]),
    ],
)  # fmt: skip
def test_a_flag_is_read(words: list[str], path: str, value: Any) -> None:
    flags = given(*words)
    assert flags == {path: value}
    read = functools.reduce(getattr, path.split("."), Config.load(None, flags))
    assert read == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--data.options.path", "x"], {"data.options.path": "x"}),
        (["--data.options.held-out-size", "20"], {"data.options.held_out_size": 20}),
        (["--data.options.held-out-size=20"], {"data.options.held_out_size": 20}),
        (["--env.options.score.name", "math"], {"env.options.score.name": "math"}),
        (["--env.options.strict", "--actors.engine-options.kv_gb", "-1.5"],
         {"env.options.strict": True, "actors.engine_options.kv_gb": -1.5}),
        (["--launch.gpus.actor-0", "2"], {"launch.gpus.actor-0": 2}),
        (["--env.options", "{a: 1}"], {}),
        (["--env.optionz.a", "1"], {}),
    ],
)  # fmt: skip
def test_single_keys_of_a_mapping_are_flags(words: list[str], flags: dict[str, Any]) -> None:
    rest, keys = option_flags(words)
    assert keys == flags
    assert (rest == words) == (not flags)


def test_a_key_stands_over_the_file_and_the_whole_mapping(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("env: {options: {score: gsm8k, strict: true}}\n")
    flags = {"env.options.score.name": "math"}
    with pytest.raises(ConfigError, match=r"--env\.options\.score\.name sets a key of score, which is 'gsm8k'"):
        Config.load(tmp_path / "c.yaml", flags)
    loaded = load(Config, tmp_path / "c.yaml", {"env.options.score": "math"})
    assert loaded.config.env.options == {"score": "math", "strict": True}
    assert loaded.sources["env.options"] == "file and flags"
    both = Config.load(None, {"env.options.score": "math", "env.options": {"tool": 1}})
    assert both.env.options == {"tool": 1, "score": "math"}


def test_a_file_named_by_a_key_is_found_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.parquet").touch()
    monkeypatch.chdir(tmp_path)
    options = Config.load(None, {"data.options.path": "train.parquet"}).data.options
    assert options == {"path": str(tmp_path / "train.parquet")}


def test_the_help_has_every_field_with_its_default() -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        given("--help")
    text = re.sub(r"[│\s]+", " ", shown.getvalue())
    for path, _ in fields(Config):
        assert "--" + path.replace("_", "-") + " " in text
        assert meaning(Config, path).split(".")[0].split("\n")[0][:30] in text
    assert text.count("(default:") == len(list(fields(Config)))


def test_an_unknown_flag_names_the_nearest() -> None:
    assert "did you mean --buffer.max-staleness" in str(unknown_flag("--buffer.max-stalenes"))
    assert "did you mean --buffer.max-staleness" in str(unknown_flag("--learner.max_staleness=3"))
