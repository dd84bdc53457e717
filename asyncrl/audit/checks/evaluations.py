"""The evaluation sets: each is in the state that its results and the sets after it imply."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.evaluation import RESTARTS

Rules = Sequence[Bounds]


def evaluations(ledger: LedgerRows, rules: Rules, held_out: int) -> Iterator[str]:
    """`held_out`: how many held-out tasks the source has."""
    return apply(EVALUATIONS, ledger, rules, held_out)


def sets_are_of_published_versions(ledger: LedgerRows, _: Rules, __: int) -> Iterator[str]:
    """An evaluation is pinned to a version that was published."""
    for row in ledger.tables["evals"]:
        pinned = row["branch"], row["version"]
        if pinned not in ledger.published:
            yield f"evaluation {row['serial']} is pinned to version {pinned[1]} of branch {pinned[0]}, never published"


def sets_have_their_state(ledger: LedgerRows, rules: Rules, held_out: int) -> Iterator[str]:
    """A set is done when it has all its results; one that was begun again was restarted, at most twice."""
    counted = Counter(row["serial"] for row in ledger.tables["eval_results"])
    of_label: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in ledger.tables["evals"]:
        of_label[row["label"]].append(row)
    last = max((row["serial"] for row in ledger.tables["evals"]), default=0)
    for rows in of_label.values():
        for place, row in enumerate(rows):
            full = any(counted[row["serial"]] == r.eval_size(held_out) for r in rules)
            expected = _state(full, place == len(rows) - 1, len(rows), row["serial"] == last)
            if row["state"] not in expected:
                yield (
                    f"evaluation {row['serial']} is {row['state']} with {counted[row['serial']]} results, as number "
                    f"{place + 1} of {len(rows)} with its label; expected {' or '.join(expected)}"
                )
    for serial in counted.keys() - {row["serial"] for row in ledger.tables["evals"]}:
        yield f"results are recorded for evaluation {serial}, which is not in the ledger"


def _state(full: bool, is_last: bool, of_label: int, newest: bool) -> tuple[str, ...]:
    if not is_last:
        return ("restarted",)
    if full:
        return ("done",)
    return ("open",) * newest + ("failed",) * (of_label > RESTARTS) or ("done",)


def results_are_greedy_in_place(ledger: LedgerRows, rules: Rules, _: int) -> Iterator[str]:
    """Of each task, the results behind the sampled ones are greedy, and no others."""
    for row in ledger.tables["eval_results"]:
        if not any(bool(row["greedy"]) == (row["idx"] >= r.eval_samples) for r in rules):
            yield f"result {row['idx']} of task {row['task']} in evaluation {row['serial']} has greedy {row['greedy']}"


EVALUATIONS: tuple[Check, ...] = (
    sets_are_of_published_versions,
    sets_have_their_state,
    results_are_greedy_in_place,
)
