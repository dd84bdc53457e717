"""Every wrong input ends in one sentence that names the field, the value and what was expected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config import Config
from asyncrl.config.loading import fields, load, show
from asyncrl.config.meanings import meaning
from asyncrl.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return file


def refused(file: Path | None, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Config, file, {name.replace("__", "."): value for name, value in flags.items()})
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_flags_go_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "buffer: {capacity: 512, max_staleness: 4}\n")
    sourced = load(Config, file, {"buffer.max_staleness": 1})
    assert (sourced.config.buffer.capacity, sourced.config.buffer.max_staleness) == (512, 1)
    assert {sourced.sources[f"buffer.{f}"] for f in ("capacity", "max_staleness", "dir")} == {"file", "flag", "default"}


def test_a_flag_within_a_section_of_a_section_leaves_its_neighbours(tmp_path: Path) -> None:
    file = write(tmp_path, "learner: {steps: 7, lora: {r: 4, lora_alpha: 8.0}}\n")
    sourced = load(Config, file, {"learner.lora.r": 16, "learner.lora.target_modules": ["q_proj"]})
    lora = sourced.config.learner.lora
    assert (sourced.config.learner.steps, lora.r, lora.lora_alpha, lora.target_modules) == (7, 16, 8.0, ("q_proj",))
    assert [sourced.sources[f"learner.lora.{f}"] for f in ("r", "lora_alpha", "use_rslora")] == [
        "flag",
        "file",
        "default",
    ]
    assert yaml.safe_load(show(sourced))["learner"]["lora"]["r"] == 16
    assert "learner.lora.rank in" in refused(write(tmp_path, "learner: {lora: {rank: 4}}\n"))
    assert refused(None, learner__lora__r=-1).startswith("--learner.lora.r is -1")


def test_a_file_that_says_nothing_is_the_defaults(tmp_path: Path) -> None:
    assert Config.load(write(tmp_path, ""), {}) == Config.load(None, {}) == Config()
    assert Config.load(write(tmp_path, "buffer:\nlearner:\n"), {}) == Config()


def test_the_committed_configs_are_valid() -> None:
    files = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert files
    for file in files:
        load(Config, file, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("buffer: {max_stalenes: 2}", ["buffer.max_stalenes", "did you mean buffer.max_staleness"]),
        ("bufer: {capacity: 2}", ["bufer", "did you mean buffer"]),
        ("learner: {max_staleness: 2}", ["learner.max_staleness", "did you mean buffer.max_staleness"]),
        ("zzz: 1", ["zzz in", "is not a field"]),
        (
            "actors: {resume_episodes: true}",
            ["actors.resume_episodes in", "is not a field (it was replaced by buffer.turns)"],
        ),
        ("5: x", ["5 in"]),
        ("buffer: 3", ["buffer in", "3", "expected a section"]),
        ("buffer: {capacity: many}", ["buffer.capacity", "'many'", "expected a valid integer"]),
        ("buffer: {capacity: '5'}", ["buffer.capacity", "'5'", "expected a valid integer"]),
        ("buffer: {capacity: true}", ["buffer.capacity", "True", "expected a valid integer"]),
        ("buffer: {capacity: 1.5}", ["buffer.capacity", "1.5", "expected a valid integer"]),
        ("buffer: {capacity: -4}", ["buffer.capacity", "-4", "greater than or equal to 1"]),
        ("buffer: {fsync: never}", ["buffer.fsync", "'never'", "'commit'", "'off'"]),
        ("learner: {lr: high}", ["learner.lr", "'high'", "expected a valid number"]),
        ("learner: {unsafe: 1}", ["learner.unsafe", "1", "expected a valid boolean"]),
        ("learner: {betas: [0.9, x]}", ["learner.betas.1", "'x'", "expected a valid number"]),
        ("learner: {corrections: tis}", ["learner.corrections", "'tis'"]),
        ("env: {options: 3}", ["env.options", "3"]),
        ("env: {options: 3}", ["expected a mapping, as in {name: value}."]),
        ("tracking: {sinks: jsonl}", ["tracking.sinks in", "'jsonl'", "expected a list, as in [a, b]."]),
        ("buffer: {max_staleness: -1}", ["buffer.max_staleness in", "is -1", "equal to 0, or 'auto'."]),
        ("learner: {corrections: [3]}", ["learner.corrections.0 in", "is 3", "expected a mapping"]),
        ("launch: {seed: abc}", ["launch.seed in", "'abc'", "expected a valid integer"]),
        ("data: {seed: abc}\nlaunch: {seed: 1}", ["data.seed in", "'abc'", "expected a valid integer"]),
        ("eval: {sets: {a: 3}}", ["eval.sets.a in", "is 3", "expected a mapping, as in {name: value}."]),
        ("eval: {sets: {a: {task: 3}}}", ["eval.sets.a.task in", "no such field, it takes env, env_options, source"]),
        ("launch: {name: 5}", ["launch.name", "5", "expected a valid string"]),
        ("weights: {every: 9}", ["weights.every is 9", "buffer.max_staleness + 1 = 3"]),
        ("buffer: {capacity: 8}", ["buffer.capacity is 8", "at least 128"]),
        ("learner: {corrections: []}", ["learner.corrections", "learner.unsafe"]),
        ("actors: {top_p: 0.9, max_kept: 0}", ["actors.top_p is 0.9", "learner.unsafe"]),
        ("learner: {minibatches: 3}", ["learner.minibatches is 3", "divide"]),
        ("[1, 2]", ["list", "expected a mapping"]),
        ("buffer: {capacity: 1", ["not valid YAML", "line"]),
        ("buffer: {capacity: 1024, capacity: 2048}", ["'capacity' is given twice"]),
        ("a: &a {b: *a}", ["c.yaml"]),
        ("buffer: !!python/object/apply:os.getcwd []", ["not valid YAML"]),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    sentence = refused(write(tmp_path, text))
    for word in words:
        assert word in sentence


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.yaml")
    assert "Is a directory" in refused(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refused(tmp_path / "b.yaml")


def test_a_wrong_flag_is_named_as_a_flag(tmp_path: Path) -> None:
    file = write(tmp_path, "buffer: {capacity: 512}")
    assert refused(file, launch__seed="abc").startswith("--launch.seed is 'abc': expected a valid integer")
    assert refused(file, buffer__capacity="many").startswith("--buffer.capacity is 'many': expected a valid integer")


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("learner: {lr: 1e-6}", "learner.lr", 1e-6),  # a text, for YAML 1.1
        ("learner: {lr: 1}", "learner.lr", 1.0),
        ("buffer: {fsync: off}", "buffer.fsync", "off"),  # a boolean, for YAML 1.1
        ("launch: {name: 2026-11-20}", "launch.name", "2026-11-20"),  # a date, for YAML 1.1
        ("buffer: {filters: [zero_variance]}", "buffer.filters", ("zero_variance",)),
        ("learner: {corrections: [{name: tis, cap: 5.0}]}", "learner.corrections", ({"name": "tis", "cap": 5.0},)),
        ("launch: {seed: null}", "launch.seed", None),
        ("launch: {cpus: {actor: [0], learner: [1, 2]}}", "launch.cpus", {"actor": (0,), "learner": (1, 2)}),
    ],
)
def test_what_yaml_means(tmp_path: Path, text: str, path: str, value: Any) -> None:
    section, name = path.split(".")
    assert getattr(getattr(Config.load(write(tmp_path, text), {}), section), name) == value


def test_one_seed_for_all_and_its_source(tmp_path: Path) -> None:
    sourced = load(Config, write(tmp_path, "launch: {seed: 7}\nactors: {seed: 1}"), {})
    c = sourced.config
    assert (c.data.seed, c.actors.seed, c.learner.seed) == (7, 1, 7)
    assert (sourced.sources["data.seed"], sourced.sources["actors.seed"]) == ("file (launch.seed)", "file")


def test_one_seed_for_all_as_a_flag_stands_over_the_file_s_seeds(tmp_path: Path) -> None:
    sourced = load(Config, write(tmp_path, "data: {seed: 5}\nactors: {seed: 1}"), {"launch.seed": 7, "actors.seed": 2})
    c = sourced.config
    assert (c.data.seed, c.actors.seed, c.learner.seed) == (7, 2, 7)
    assert (sourced.sources["data.seed"], sourced.sources["actors.seed"]) == ("flag (launch.seed)", "flag")


@pytest.mark.parametrize(
    ("text", "flags", "chosen", "sources"),
    [
        ("launch: {tuning: auto}", {}, ("auto", "auto"), ("file (launch.tuning)", "file (launch.tuning)")),
        ("", {"launch.tuning": "auto"}, ("auto", "auto"), ("flag (launch.tuning)", "flag (launch.tuning)")),
        (
            "buffer: {max_staleness: 3}\nactors: {slots: 5}",
            {"launch.tuning": "auto"},
            ("auto", "auto"),
            ("flag (launch.tuning)", "flag (launch.tuning)"),
        ),
        (
            "launch: {tuning: auto}\nbuffer: {max_staleness: auto}",
            {},
            ("auto", "auto"),
            ("file", "file (launch.tuning)"),
        ),
        ("launch: {tuning: auto}", {"launch.tuning": "off"}, (2, 64), ("default", "default")),
        ("launch: {tuning: off}\nactors: {slots: 5}", {}, (2, 5), ("default", "file")),
    ],
)
def test_tuning_sets_bound_and_slots_and_their_source(
    tmp_path: Path, text: str, flags: dict[str, Any], chosen: tuple[Any, Any], sources: tuple[str, str]
) -> None:
    sourced = load(Config, write(tmp_path, text), flags)
    assert (sourced.config.buffer.max_staleness, sourced.config.actors.slots) == chosen
    assert (sourced.sources["buffer.max_staleness"], sourced.sources["actors.slots"]) == sources


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("launch: {tuning: auto}\nbuffer: {max_staleness: 3}", "launch.tuning is auto and buffer.max_staleness 3"),
        ("launch: {tuning: auto}\nactors: {slots: 5}", "launch.tuning is auto and actors.slots 5"),
        ("launch: {tuning: auto}\nenv: {group_score: 'm:f'}", "env.group_score 'm:f'"),
    ],
)
def test_what_tuning_cannot_work_with_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(Config, write(tmp_path, text), {})


def test_what_is_shown_can_be_read_again(tmp_path: Path) -> None:
    flags = {"env.options": {"tool_latency_s": 0.5}, "learner.lr": 1e-5, "buffer.fsync": "off", "launch.name": "null"}
    sourced = load(Config, None, flags)
    shown = show(sourced)
    assert Config.load(write(tmp_path, shown), {}) == sourced.config
    assert shown.count("# flag") == 4
    assert len(yaml.safe_load(shown)) == len(Config.model_fields)


def test_every_field_is_documented() -> None:
    undocumented = [path for path, _ in fields(Config) if not meaning(Config, path).endswith(".")]
    assert undocumented == []


def test_a_bare_env_is_its_name(tmp_path: Path) -> None:
    assert Config.load(write(tmp_path, "env: my.module:agent\n"), {"env.max_turns": 3}).env.name == "my.module:agent"


def test_a_config_is_loaded_from_python(tmp_path):
    file = write(tmp_path, "buffer: {capacity: 512}")
    config = Config.load(str(file), {"buffer.max_staleness": 1})
    assert (config.buffer.capacity, config.buffer.max_staleness) == (512, 1)
    assert Config.load() == Config()
    with pytest.raises(ConfigError, match=r"did you mean buffer\.max_staleness"):
        Config.load(overrides={"buffer.max_stale": 1})
