"""Rules for settings of single environments: limits within the bounds of the whole run, estimators that can be used."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from asyncrl.config.tree import Tree

LIMITS = {"max_turns": "env", "max_tokens": "env", "max_new_tokens": "actors", "call_s": "env"}
"""Limits that one environment of a mix may set for itself, and the section whose field bounds them for all."""


def of_environments(c: Tree, need_values: Collection[str]) -> list[str]:
    """One sentence for each problem. `need_values`: estimators that read a critic's values."""
    envs = c.env.options.get("envs") if c.env.name == "mix" else None
    specs: dict[str, Any] = envs if isinstance(envs, dict) else {}
    return _limits(c, specs) + _estimators(c, list(specs) or [c.env.name], need_values)


def _limits(c: Tree, specs: dict[str, Any]) -> list[str]:
    own = ((env, limit, spec) for env, spec in specs.items() if isinstance(spec, dict) for limit in LIMITS)
    problems = [_limit(c, env, limit, spec[limit]) for env, limit, spec in own if limit in spec]
    found = [problem for problem in problems if problem]
    return found or _without_room(c, specs)


def _without_room(c: Tree, specs: dict[str, Any]) -> list[str]:
    """One sentence for each environment whose own limits leave no room for a summary."""
    problems = []
    for env, spec in specs.items():
        given = spec if isinstance(spec, dict) else {}
        row, new = given.get("max_tokens", c.env.max_tokens), given.get("max_new_tokens", c.actors.max_new_tokens)
        if "max_tokens" in given and c.env.compact and (left := row - int(c.env.compact * row)) <= new:
            problems.append(
                f"env.compact is {c.env.compact:g}: of env.options.envs.{env}.max_tokens = {row} it leaves {left} "
                f"tokens for the request and the summary, which may have max_new_tokens = {new}: lower env.compact, or "
                f"set env.options.envs.{env}.max_new_tokens lower."
            )
    return problems


def _limit(c: Tree, env: str, limit: str, value: Any) -> str | None:
    field, section = f"env.options.envs.{env}.{limit}", LIMITS[limit]
    most = getattr(getattr(c, section), limit)
    expected = float | int if limit == "call_s" else int
    if isinstance(value, bool) or not isinstance(value, expected) or value <= 0:
        return f"{field} is {value!r}: expected a number above 0."
    if limit != "call_s" and value > most:
        return (
            f"{field} is {value}, above {section}.{limit} = {most}, which bounds all: lower it, or raise "
            f"{section}.{limit}."
        )
    return None


def _estimators(c: Tree, envs: list[str], need_values: Collection[str]) -> list[str]:
    problems = []
    for env, spec in c.learner.advantage_by_env.items():
        field, name = f"learner.advantage_by_env.{env}", spec.get("name")
        if env not in envs:
            problems.append(f"{field}: {env!r} is not an environment of this run: expected {', '.join(envs)}.")
        if name in need_values and c.learner.critic == "none":
            problems.append(f"{field} is {name}, which needs values: set learner.critic shared or separate.")
        if name == "remax" or c.learner.greedy_baseline:
            problems.append(
                f"{field} is {name}: learner.greedy_baseline plays a greedy answer in every group, so remax is for all "
                "environments or for none. Set learner.advantage."
            )
        if name == "gdpo" and (c.learner.shaping or c.learner.kl_in == "reward"):
            problems.append(
                f"{field} is gdpo, which reads the named rewards as they came: learner.shaping and learner.kl_in "
                "reward would not reach it. Leave them out, or choose another estimator."
            )
    return problems
