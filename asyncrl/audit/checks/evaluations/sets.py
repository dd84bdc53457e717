"""The evaluation sets: each has the identity, the state, the results and the measures that follow from the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.evaluations.measures import measures, row_of
from asyncrl.buffer.evaluations.sets import RESTARTS
from asyncrl.config.held_out import HeldOutSet

Rules = Sequence[Bounds]
Sizes = Mapping[str, int]
Row = dict[str, Any]


def evaluations(ledger: LedgerRows, rules: Rules, held_out: Sizes) -> Iterator[str]:
    """`held_out`: how many held-out tasks the source of each set has, by its name."""
    return apply(EVALUATIONS, ledger, rules, held_out)


def sets_are_of_published_versions(ledger: LedgerRows, rules: Rules, _: Sizes) -> Iterator[str]:
    """A set of the configuration is due at a published version, which plays it unless it began again at a newer one."""
    before: dict[tuple[Any, ...], tuple[int, int]] = {}
    for row in ledger.tables["evals"]:
        due, pinned = (row["branch"], row["due"]), (row["on_branch"], row["version"])
        for version in {due, pinned} - ledger.published.keys():
            yield f"{_name(row)} is of version {version[1]} of branch {version[0]}, never published"
        was = before.get((row["name"], *due))
        if (pinned != due) if was is None else (pinned < was):
            yield f"{_name(row)} was due at {due} and was pinned to {was or due}, then to {pinned}"
        before[row["name"], *due] = pinned
        if not _sets(rules, row["name"]):
            yield f"{_name(row)} is of no set of the configuration"


def sets_are_opened_when_they_are_due(ledger: LedgerRows, rules: Rules, _: Sizes) -> Iterator[str]:
    """Every set was opened, or skipped, at each published version at which it was due."""
    schedules = {(r.eval_every, tuple(each.name for each in r.eval_sets)) for r in rules}
    if len(schedules) != 1:
        return  # which one was in force at a version is not recorded
    ((every, names),) = schedules
    known = {(row["name"], row["branch"], row["due"]) for row in ledger.tables["evals"]}
    for branch, version in ledger.published:
        for name in names if every and version and version % every == 0 else ():
            if (name, branch, version) not in known:
                yield f"set {name} was neither opened nor skipped at the published version {version} of branch {branch}"


def sets_have_their_state(ledger: LedgerRows, rules: Rules, held_out: Sizes) -> Iterator[str]:
    """A set is done when it has all its results; one that was begun again was restarted, at most twice."""
    counted: defaultdict[int, int] = defaultdict(int)
    for result in ledger.tables["eval_results"]:
        counted[result["serial"]] += 1
    begun = [row for row in ledger.tables["evals"] if row["state"] != "skipped"]
    latest = _identity(begun[-1])[1:] if begun else None
    again: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in begun:
        again[_identity(row)].append(row)
    for rows in again.values():
        for place, row in enumerate(rows):
            full = any(counted[row["serial"]] == size for size in _sizes(rules, row["name"], held_out))
            expected = _state(full, place == len(rows) - 1, len(rows), _identity(row)[1:] == latest)
            # What is no longer in the configuration ends as failed.
            if row["state"] not in (*expected, *("failed",) * (len(rules) > 1 and not full)):
                yield (
                    f"{_name(row)} is {row['state']} with {counted[row['serial']]} results, as number {place + 1} of "
                    f"{len(rows)} with its identity; expected {' or '.join(expected)}"
                )
    for serial in counted.keys() - {row["serial"] for row in begun}:
        yield f"results are recorded for evaluation {serial}, which was skipped or is not in the ledger"


def _state(full: bool, is_last: bool, begun: int, newest: bool) -> tuple[str, ...]:
    if not is_last:
        return ("restarted",)
    if full:
        return ("done",)
    return ("open",) * newest + ("failed",) * (begun > RESTARTS) or ("done",)


def sets_are_skipped_while_another_is_open(ledger: LedgerRows, _: Rules, __: Sizes) -> Iterator[str]:
    """A set is skipped once, while one is open that was due at another version, and all sets of a step alike."""
    fate: dict[tuple[Any, ...], set[bool]] = defaultdict(set)
    begun: set[tuple[Any, ...]] = set()
    yield from _skipped_twice(ledger)
    for row in ledger.tables["evals"]:
        at, skipped = _identity(row)[1:], row["state"] == "skipped"
        if skipped and not begun - {at}:
            yield f"{_name(row)} is skipped, and nothing was open"
        if not skipped:
            begun.add(at)
        if skipped or row["state"] != "restarted":
            fate[at].add(skipped)
        if (row["ended_at"] is None) != (row["state"] == "open"):
            yield f"{_name(row)} is {row['state']} and ended at {row['ended_at']}"
    last = max(ledger.published, default=None)
    for at, both in fate.items():
        if len(both) == 2 and at != last and not _ended_there(ledger, at):
            yield f"of the sets due at version {at[1]} of branch {at[0]} some were skipped and some were played"


def _skipped_twice(ledger: LedgerRows) -> Iterator[str]:
    skips = Counter(_identity(row) for row in ledger.tables["evals"] if row["state"] == "skipped")
    for (name, branch, due), times in skips.items():
        if times > 1:
            yield f"set {name} is skipped {times} times at version {due} of branch {branch}"


def _ended_there(ledger: LedgerRows, at: tuple[Any, ...]) -> bool:
    """Whether the run may have ended at this version once: what was skipped there is then played after the end."""
    return any(row["start_version"] >= at[1] for row in ledger.tables["incarnations"])


def results_are_in_place(ledger: LedgerRows, rules: Rules, held_out: Sizes) -> Iterator[str]:
    """Each result is of an episode of its set; behind the sampled ones of a task comes the greedy one."""
    names = {row["serial"]: row["name"] for row in ledger.tables["evals"]}
    for row in ledger.tables["eval_results"]:
        sets = _sets(rules, names.get(row["serial"], ""))
        fits = (
            row["task"] < min(each.tasks, held_out.get(each.name, each.tasks))
            and row["idx"] < each.per_task
            and bool(row["greedy"]) == (row["idx"] >= each.samples)
            for each in sets
        )
        if not any(fits):
            yield (
                f"result {row['idx']} of task {row['task']} in evaluation {row['serial']}, with greedy "
                f"{row['greedy']}, is of no episode of its set"
            )


def results_are_of_the_pinned_version(ledger: LedgerRows, _: Rules, __: Sizes) -> Iterator[str]:
    """Every token of an evaluation was sampled by the version to which it is pinned; what failed has no result."""
    pinned = {row["serial"]: row["version"] for row in ledger.tables["evals"]}
    for row in ledger.tables["eval_results"]:
        if not row["digest"] and (row["task_id"], row["reward"], row["rewards"]) != ("", 0.0, "null"):
            yield f"result {row['idx']} of task {row['task']} in evaluation {row['serial']} failed, and has a reward"
        expected = pinned.get(row["serial"]) if row["digest"] else None
        if {row["oldest"], row["newest"]} != {expected}:
            yield (
                f"result {row['idx']} of task {row['task']} in evaluation {row['serial']} is of versions "
                f"{row['oldest']} to {row['newest']}, expected {expected}"
            )


def measures_follow(ledger: LedgerRows, rules: Rules, _: Sizes) -> Iterator[str]:
    """What a set that is done has measured follows from its results; no other set has measures."""
    results: defaultdict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in ledger.tables["eval_results"]:
        results[row["serial"]].append(tuple(row[x] for x in ("task_id", "greedy", "reward", "rewards", "digest")))
    recorded: defaultdict[int, dict[str, tuple[Any, ...]]] = defaultdict(dict)
    for row in ledger.tables["eval_measures"]:
        serial, way, *values = row.values()
        recorded[serial][way] = tuple(values)
    for row in ledger.tables["evals"]:
        said = recorded.pop(row["serial"], {})
        done = _sets(rules, row["name"]) if row["state"] == "done" else ()
        expected = [_measured(results[row["serial"]], each) for each in done] or [{}]
        if said not in expected:
            yield f"{_name(row)} has measured {said}; its results give {expected[-1]}"
    for serial in recorded:
        yield f"measures are recorded for evaluation {serial}, which is not in the ledger"


def _measured(results: list[tuple[Any, ...]], held_out: HeldOutSet) -> dict[str, tuple[Any, ...]] | None:
    try:
        return {way: row_of(m) for way, m in measures(results, held_out).items()}
    except (ValueError, TypeError, AttributeError):  # rewards that are not JSON, or not a mapping
        return None


def _sets(rules: Rules, name: str) -> list[HeldOutSet]:
    """The set of this name in each configuration."""
    return [each for r in rules for each in r.eval_sets if each.name == name]


def _sizes(rules: Rules, name: str, held_out: Sizes) -> list[int]:
    return [min(each.tasks, held_out.get(name, each.tasks)) * each.per_task for each in _sets(rules, name)]


def _identity(row: Row) -> tuple[Any, ...]:
    return row["name"], row["branch"], row["due"]


def _name(row: Row) -> str:
    return f"evaluation {row['serial']}, of set {row['name']} at version {row['due']} of branch {row['branch']},"


EVALUATIONS: tuple[Check, ...] = (
    sets_are_of_published_versions,
    sets_are_opened_when_they_are_due,
    sets_have_their_state,
    sets_are_skipped_while_another_is_open,
    results_are_in_place,
    results_are_of_the_pinned_version,
    measures_follow,
)
