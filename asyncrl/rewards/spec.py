"""Makes a score from the config: `env.options.score`.

score: gsm8k                                   # a name, or path/to/file.py:name
score: {name: rewards.py:score, options: {strict: true}, wrap: [{name: in_processes, timeout_s: 5}]}
score:                                         # several: their weighted sum, each kept by its name
  - {name: math}
  - {name: rewards.py:has_think_tags, weight: 0.1, label: format}
"""

from __future__ import annotations

import functools
import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from asyncrl.plugins import check_options, resolve
from asyncrl.rewards.score import Score
from asyncrl.rewards.table import REWARDS, WRAPPERS
from asyncrl.rewards.wrappers import Weighted

ScoreSpec = Score | str | dict[str, Any] | list[str | dict[str, Any]]
COLUMNS = ("data_source", "solution_str", "ground_truth", "extra_info", "task", "tokens")
PLURAL = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True, slots=True)
class NamedScore:
    """One named reward."""

    label: str
    weight: float
    score: Score
    """A function, or a class whose objects are scores."""
    options: Mapping[str, Any]
    wrap: tuple[tuple[Score, Mapping[str, Any]], ...]
    """Wrappers and their options, the innermost first."""


def parse(spec: str | dict[str, Any] | list[str | dict[str, Any]], field: str) -> tuple[NamedScore, ...]:
    """The parts that `spec` names, with checked options, without instantiating any. Raises ValueError."""
    entries = spec if isinstance(spec, list) else [spec]
    if not entries:
        raise ValueError(f"{field} is empty: name at least one score.")
    parts = tuple(_part(entry, f"{field}[{i}]" if isinstance(spec, list) else field) for i, entry in enumerate(entries))
    labels = [part.label for part in parts]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"{field} has two scores called {label!r}: give them a `label` each.")
    return parts


def check(spec: str | dict[str, Any] | list[str | dict[str, Any]], field: str) -> None:
    """Refuse a spec that cannot work, for instance without its key, before anything runs. Raises ValueError.

    Scores of asyncrl are instantiated for this, which is cheap; a user's class is not.
    """
    for part in parse(spec, field):
        if not inspect.isclass(part.score) or part.score.__module__.startswith("asyncrl."):
            try:
                _wrapped(part)
            except ValueError as error:
                raise ValueError(f"{field}: {part.label}: {error}") from error


def build(spec: ScoreSpec, field: str) -> Score:
    """The score that `spec` means. Raises ValueError.

    There is one object per event loop's thread for the same spec, so that episodes there share limits and workers.
    """
    if callable(spec):
        return spec
    key = json.dumps(spec, sort_keys=True, default=repr)
    built: dict[str, Score] = vars(_of_thread).setdefault("built", {})
    if key not in built:
        built[key] = _build(parse(spec, field))
    return built[key]


_of_thread = threading.local()
"""Batches and limits belong to one event loop: under `env.workers: threads` there are several."""


def _build(parts: Sequence[NamedScore]) -> Score:
    made: dict[str, tuple[float, Score]] = {}
    for part in parts:
        made[part.label] = (part.weight, _wrapped(part))
    (weight, only), *others = made.values()
    return only if not others and weight == 1 else Weighted(made)


def _wrapped(part: NamedScore) -> Score:
    score = _made(part.score, part.options)
    for wrapper, options in part.wrap:
        score = wrapper(score, **options)
    return score


def _made(score: Score, options: Mapping[str, Any]) -> Score:
    if inspect.isclass(score):
        made: Any = score
        return cast(Score, made(**options))
    return functools.partial(score, **options) if options else score


def _part(entry: Any, field: str) -> NamedScore:
    entry = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ValueError(f"{field} is {entry!r}: expected a name, or a mapping with `name`.")
    known = ("name", "weight", "label", "options", "wrap")
    if unknown := [key for key in entry if key not in known]:
        raise ValueError(
            f"{field}.{unknown[0]}: no such field; expected {', '.join(known)}. The score's own options go into "
            "`options`."
        )
    name, options = entry["name"], entry.get("options") or {}
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"{field}.weight is {weight!r}: expected a number.")
    score = resolve(name, REWARDS, field)
    if not callable(score):
        raise ValueError(f"{field} is {name!r}, a {type(score).__name__}: expected a function or a class.")
    if not inspect.isclass(score):
        _check_parameters(score, name, options, field)
    check_options(score, options, f"{field}.options", () if inspect.isclass(score) else (*COLUMNS, *PLURAL))
    wrap = tuple(_wrapper(w, f"{field}.wrap[{i}]") for i, w in enumerate(entry.get("wrap") or ()))
    return NamedScore(entry.get("label") or name.rpartition(":")[2], float(weight), score, options, wrap)


def _check_parameters(score: Score, name: str, options: Mapping[str, Any], field: str) -> None:
    """Raises ValueError for a parameter without default that is neither a column nor an option."""
    for parameter in inspect.signature(score).parameters.values():
        plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        given = parameter.default is not parameter.empty or parameter.name in (*COLUMNS, *PLURAL, *options)
        if plain and not given:
            raise ValueError(
                f"{field} is {name!r}, and its parameter {parameter.name!r} has no value: a score gets those of "
                f"{', '.join(COLUMNS)} that it names. Rename the parameter, or set it in `options`."
            )


def _wrapper(entry: Any, field: str) -> tuple[Score, Mapping[str, Any]]:
    entry = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ValueError(f"{field} is {entry!r}: expected a wrapper's name, or a mapping with `name` and its options.")
    options = {key: value for key, value in entry.items() if key != "name"}
    wrapper = resolve(entry["name"], WRAPPERS, field)
    check_options(wrapper, options, field, provided=("score",))
    return wrapper, options
