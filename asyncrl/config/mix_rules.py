"""What the environments of a run have of their own: it lies within what all have, and means something."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config import Config

LIMITS = {"max_turns": "env", "max_tokens": "env", "max_new_tokens": "actors", "call_s": "env"}
"""What an environment of a mix may have of its own, and the section of the config that has it for all."""


def of_environments(c: Config, need_values: Collection[str]) -> list[str]:
    """One sentence for each problem. `need_values`: estimators that read a critic's values."""
    envs = c.env.options.get("envs") if c.env.name == "mix" else None
    specs: dict[str, Any] = envs if isinstance(envs, dict) else {}
    return _limits(c, specs) + _estimators(c, list(specs) or [c.env.name], need_values)


def _limits(c: Config, specs: dict[str, Any]) -> list[str]:
    problems = []
    for env, spec in specs.items():
        for limit, section in LIMITS.items():
            if not isinstance(spec, dict) or limit not in spec:
                continue
            field, value, most = f"env.options.envs.{env}.{limit}", spec[limit], getattr(getattr(c, section), limit)
            expected = float | int if limit == "call_s" else int
            if isinstance(value, bool) or not isinstance(value, expected) or value <= 0:
                problems.append(f"{field} is {value!r}: expected a number above 0.")
            elif limit != "call_s" and value > most:
                problems.append(
                    f"{field} is {value}, above {section}.{limit} = {most}, which bounds all: lower it, or raise "
                    f"{section}.{limit}."
                )
    return problems


def _estimators(c: Config, envs: list[str], need_values: Collection[str]) -> list[str]:
    problems = []
    for env, spec in c.learner.advantage_by_env.items():
        field, name = f"learner.advantage_by_env.{env}", spec.get("name")
        if env not in envs:
            problems.append(f"{field}: {env!r} is no environment of this run: expected {', '.join(envs)}.")
        if name in need_values and c.learner.critic == "none":
            problems.append(f"{field} is {name}, which needs values: set learner.critic shared or separate.")
        if name == "remax" or c.learner.greedy_baseline:
            problems.append(
                f"{field} is {name}: the greedy answers of learner.greedy_baseline are of every group, so remax is for "
                "all environments or for none. Set learner.advantage."
            )
        if name == "gdpo" and (c.learner.shaping or c.learner.kl_in == "reward"):
            problems.append(
                f"{field} is gdpo, which reads the named rewards as they came: learner.shaping and learner.kl_in "
                "reward would not reach it. Leave them out, or choose another estimator."
            )
    return problems
