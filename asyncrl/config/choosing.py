"""What follows from the results of evaluations: when a run stops early, which weights are kept, what is played last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.config.held_out import held_out_sets
from asyncrl.config.tree import Tree

Figure = tuple[str, str]
"""A held-out set and the way in which it is sampled: its success is meant."""
WAYS = ("sampled", "greedy")


@dataclass(frozen=True, slots=True)
class Choosing:
    stop_at: tuple[tuple[Figure, float], ...] = ()
    """The success at which the run ends."""
    patience: tuple[tuple[Figure, int], ...] = ()
    """The number of evaluations without a better success after which it ends."""
    keep_best: Figure | None = None
    """By which weights are kept."""

    @classmethod
    def of(cls, c: Tree) -> Choosing:
        stop_at = tuple((figure(name), value) for name, value in c.eval.stop_at.items())
        patience = tuple((figure(name), count) for name, count in c.eval.patience.items())
        return cls(stop_at, patience, figure(c.eval.keep_best) if c.eval.keep_best else None)


def figure(name: str) -> Figure:
    """
    >>> figure("dev"), figure("dev/greedy")
    (('dev', 'sampled'), ('dev', 'greedy'))
    """
    of_set, _, way = name.partition("/")
    return of_set, way or "sampled"


def impossible_choices(c: Tree) -> list[str]:
    """What is wrong with them: one sentence each, with field, value, expectation and remedy."""
    e = c.eval
    named = [("stop_at", name) for name in e.stop_at] + [("patience", name) for name in e.patience]
    named += [("keep_best", e.keep_best)] if e.keep_best else []
    problems = [problem for field, name in named for problem in _impossible_figure(c, f"eval.{field}", name)]
    if named and not e.every:
        problems.append(
            f"eval.{named[0][0]} names the set {named[0][1]!r} and eval.every is 0: nothing is evaluated during the "
            "run. Set eval.every."
        )
    return list(_impossible_final(c)) + problems


def _impossible_figure(c: Tree, field: str, name: str) -> Iterator[str]:
    sets = {each.name: each for each in held_out_sets(c)}
    of_set, way = figure(name)
    if of_set not in sets:
        known = ", ".join(sets) or "none"
        yield f"{field} names the set {of_set!r}; the sets that are played during the run: {known}. Name one of them."
    elif way not in WAYS:
        yield f"{field} is {name!r}: behind `/` stands sampled or greedy, the way in which the set is played."
    elif way == "greedy" and not sets[of_set].greedy:
        yield f"{field} is {name!r}, and this set is not played greedily: set its greedy to true, or name {of_set}."


def _impossible_final(c: Tree) -> Iterator[str]:
    e = c.eval
    if not e.final:
        return
    if e.final not in e.sets:
        known = ", ".join(e.sets) or "none"
        yield f"eval.final is {e.final!r}, none of eval.sets ({known}): name one that is played at the end only."
    if not e.keep_best:
        yield f"eval.final is {e.final!r} without eval.keep_best, so no best weights are kept to play it: set it too."
    if urls := c.actors.engine_options.get("urls"):
        yield (
            f"eval.final is {e.final!r} and actors.engine_options.urls {urls!r}: running servers hold weights of their "
            "own, not those of the best export. Use an engine that loads it, or play it yourself with asyncrl eval."
        )
    if c.launch.backend != "local":
        yield (
            f"eval.final is {e.final!r} and launch.backend {c.launch.backend!r}: the launcher plays it, on its own "
            "machine, which need not have an engine. Leave it empty, and play the best export with asyncrl eval."
        )
    used = {figure(name)[0] for name in (*e.stop_at, *e.patience, e.keep_best) if name}
    if e.final in used:
        yield (
            f"eval.final is {e.final!r}, which chooses the weights or the end as well: its result would be too high. "
            "Name another set."
        )
