"""Choices by name or import path, and options checked against a signature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from asyncrl.errors import ConfigError
from asyncrl.plugins import build, check_options, resolve


def test_table_entry_wins() -> None:
    assert resolve("a", {"a": 1}, "f") == 1


def test_import_path() -> None:
    assert resolve("math:sqrt", {"a": math.cos}, "f") is math.sqrt
    assert resolve("collections:OrderedDict.fromkeys", None, "f") is not None


def test_file_path_loads_once(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Thing:\n    size = 3\n")
    first: Any = resolve(f"{file}:Thing", None, "f")
    assert first.size == 3
    assert resolve(f"{file}:Thing", None, "f") is first


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decouple_ppo", r"learner.loss: 'decouple_ppo' .*did you mean 'decoupled_ppo'"),
        ("nowhere.at.all:f", r"learner.loss: .*no module named 'nowhere'"),
        ("math:sqrtt", r"learner.loss: .*has no 'sqrtt' \(did you mean 'sqrt'"),
        ("absent/file.py:f", r"learner.loss: .*no file .*absent/file.py"),
    ],
)
def test_resolve_names_the_field_and_the_remedy(name: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        resolve(name, {"decoupled_ppo": math.sqrt}, "learner.loss")


def test_error_inside_the_users_module_is_not_hidden(tmp_path: Any) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        resolve(f"{file}:f", None, "f")


def fn(
    x: list[int],
    *,
    low: float,
    high: float | None = None,
    level: Literal["token", "row"] = "token",
    weights: Sequence[float] = (),
    extra: list[int] | None = None,
) -> None:
    """A function whose signature the tests check options against."""


def test_good_options_pass() -> None:
    check_options(fn, {"low": 1, "high": None, "level": "row", "weights": [1.0, 2]}, "f", provided=("x",))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"low": 0.1, "hihg": 1.0}, r"f\.hihg: fn has no such option \(did you mean 'high'"),
        ({}, r"f\.low: fn needs it"),
        ({"low": 0.1, "x": []}, r"f\.x: is passed to fn by asyncrl itself"),
        ({"low": "1e-6"}, r"f\.low: '1e-6' does not suit fn.*1.0e-6"),
        ({"low": 0.1, "level": "tokens"}, r"f\.level: 'tokens' does not suit fn.*'token' or 'row'"),
        ({"low": True}, r"f\.low: True"),
        ({"low": 0.1, "weights": "x"}, r"f\.weights: 'x' does not suit fn: expected a list, as in \[a, b\]\."),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        check_options(fn, options, "f", provided=("x",))


def test_classes_and_open_keywords() -> None:
    class Engine:
        def __init__(self, url: str, **rest: Any) -> None: ...

    check_options(Engine, {"url": "x", "anything": 1}, "f")
    with pytest.raises(ValueError, match=r"f\.url"):
        check_options(Engine, {}, "f")


def test_an_entry_may_be_an_import_path() -> None:
    assert resolve("root", {"root": "math:sqrt"}, "f") is math.sqrt


class Source:
    def __init__(self, size: int, *, seed: int = 0) -> None:
        if size < 1:
            raise ValueError(f"size is {size}")
        self.size, self.seed = size, seed


def test_build_resolves_checks_and_calls() -> None:
    table = {"mine": f"{__name__}:Source"}
    made = build("mine", table, "data.source", {"size": 2}, defaults={"seed": 7, "model": "x"})
    assert (made.size, made.seed) == (2, 7)
    assert build("mine", table, "data.source", {"size": 2, "seed": 1}, defaults={"seed": 7}).seed == 1
    assert build("mine", table, "data.source", {}, provided={"size": 3}).size == 3


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("mein", {"size": 1}, r"data\.source: 'mein' is not a known name \(did you mean 'mine'"),
        ("mine", {}, r"data\.options\.size: Source needs it"),
        ("mine", {"size": 0}, r"data\.source is 'mine': size is 0"),
        ("mine", {"size": 1, "seed": 2}, r"data\.options\.seed: is passed to Source by asyncrl itself"),
        ("math:pi", {}, r"data\.source is 'math:pi', a float: expected a function or a class"),
    ],
)
def test_build_raises_one_kind_of_error(name: str, options: dict[str, Any], expected: str) -> None:
    provided = {"seed": 1} if "seed" in options else {}
    with pytest.raises(ConfigError, match=expected):
        build(name, {"mine": Source}, "data.source", options, options_field="data.options", provided=provided)
