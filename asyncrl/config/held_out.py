"""The held-out sets of a run: those of `eval.sets`, or the one that the fields of `eval` describe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.config.sections import EvalSetConfig
from asyncrl.config.tree import Tree

C = TypeVar("C", bound=Tree)

KEEP_PINNED = ("shm", "zmq")
"""Channels of weights that keep the version of an evaluation while newer ones are published."""
ONLY = "held_out"
"""Name of the set where `eval.sets` is empty."""


@dataclass(frozen=True, slots=True)
class HeldOutSet:
    name: str
    tasks: int
    """At most so many, if its source holds out fewer."""
    samples: int
    greedy: bool
    temperature: float
    success: str = "success"
    pass_at: tuple[int, ...] = ()

    @property
    def per_task(self) -> int:
        """Episodes of one task: the sampled ones, and behind them the greedy one."""
        return self.samples + self.greedy

    def temperature_of(self, index: int) -> float:
        """Temperature of episode `index` of a task; 0 is greedy."""
        return self.temperature if index < self.samples else 0.0


def held_out_sets(config: Tree) -> tuple[HeldOutSet, ...]:
    """Those that are played in a run, in their order; none if there is nothing to play."""
    return tuple(each for each in every_set(config) if each.name != config.eval.final)


def every_set(config: Tree) -> tuple[HeldOutSet, ...]:
    """With the one that is played after the end only (`eval.final`)."""
    every = (_resolved(config, name, given) for name, given in (config.eval.sets or {ONLY: EvalSetConfig()}).items())
    return tuple(each for each in every if each.tasks)


def _resolved(config: Tree, name: str, given: EvalSetConfig) -> HeldOutSet:
    e = config.eval
    return HeldOutSet(
        name,
        e.tasks if given.tasks is None else given.tasks,
        given.samples or e.samples,
        e.greedy if given.greedy is None else given.greedy,
        given.temperature or config.actors.temperature,
        given.success or e.success,
        tuple(given.pass_at),
    )


def for_set(config: C, name: str) -> C:
    """The config with this set's environment, source, temperature and sizes in their fields: with it the set is played
    as if it were the only one."""
    given, own = config.eval.sets.get(name, EvalSetConfig()), next(s for s in every_set(config) if s.name == name)
    sections: dict[str, dict[str, object]] = {
        "actors": {"temperature": own.temperature},
        "eval": {
            "tasks": own.tasks,
            "samples": own.samples,
            "greedy": own.greedy,
            "success": own.success,
            "sets": {},
            **{"stop_at": {}, "patience": {}, "keep_best": "", "final": ""},
        },
    }
    if given.env:
        sections["env"] = {"name": given.env, "options": given.env_options, "group_score": ""}
    if given.source:
        sections["data"] = {"source": given.source, "options": given.source_options}
    return config.model_copy(
        update={at: getattr(config, at).model_copy(update=values) for at, values in sections.items()}
    )


def impossible_sets(c: Tree) -> list[str]:
    """What is wrong with them: one sentence each, with field, value, expectation and remedy."""
    problems = [problem for name, given in c.eval.sets.items() for problem in _impossible_set(c, name, given)]
    return problems + _impossible_in_the_run(c)


def _impossible_set(c: Tree, name: str, given: EvalSetConfig) -> Iterator[str]:
    samples = given.samples or c.eval.samples
    if not name.replace("_", "").replace("-", "").replace(".", "").isalnum() or len(name) > 64:
        yield f"eval.sets has a set {name!r}: a name consists of letters, digits, `_`, `-` and `.`, at most 64."
    if wrong := [k for k in given.pass_at if not 1 <= k <= samples]:
        yield (
            f"eval.sets.{name}.pass_at has {wrong[0]}, and its tasks are played samples = {samples} times: give k "
            "from 1 to samples, or raise samples."
        )
    for option in ("env", "source"):
        if getattr(given, f"{option}_options") and not getattr(given, option):
            yield f"eval.sets.{name}.{option}_options is given without {option}: name it, or leave the options out."
    if given.tasks is None and not c.eval.tasks:
        yield f"eval.sets.{name} has no tasks, and eval.tasks is 0: set one of them to 1 or more."


def _impossible_in_the_run(c: Tree) -> list[str]:
    problems = []
    if c.actors.eval and c.actors.eval >= c.actors.count:
        problems.append(
            f"actors.eval is {c.actors.eval} of actors.count = {c.actors.count}, which leaves none for training: lower "
            "actors.eval, or raise actors.count."
        )
    if c.actors.eval and not c.eval.every:
        problems.append(
            f"actors.eval is {c.actors.eval} and eval.every 0: reserved actors would have nothing to play. Set "
            "eval.every, or actors.eval 0."
        )
    if c.eval.every and c.weights.channel not in KEEP_PINNED:
        problems.append(
            f"eval.every is {c.eval.every} and weights.channel {c.weights.channel}, which keeps no version for an "
            f"evaluation while newer ones are published: use weights.channel {' or '.join(KEEP_PINNED)}, or "
            "eval.every 0."
        )
    return problems


def pause(c: Tree) -> str | None:
    """What to say at the start of a run whose only actor trains and evaluates; None for any other run."""
    if not c.eval.every or c.actors.count != 1:
        return None
    played = sum(each.tasks * each.per_task for each in held_out_sets(c))
    trained = c.eval.every * c.learner.groups_per_step * c.learner.group_size
    return (
        f"eval.every is {c.eval.every} and actors.count 1: the one actor evaluates and trains in turn, so training "
        f"pauses for up to {played} held-out episodes per {trained} training episodes. More actors, with actors.eval "
        "one of them reserved, let training go on."
    )
