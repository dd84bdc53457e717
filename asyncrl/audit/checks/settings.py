"""Training steps were redone with the settings that they were first trained with, or on a branch of their own."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.config.resuming import differences

Settings = Sequence[Mapping[str, Any]]
"""Those of every configuration that the run had, by field."""


def settings(ledger: LedgerRows, of_configs: Settings) -> Iterator[str]:
    return apply(SETTINGS, ledger, of_configs)


def settings_are_of_a_configuration(ledger: LedgerRows, of_configs: Settings) -> Iterator[str]:
    """Each start of the learner had the settings of one of the run's configurations."""
    for row in ledger.tables["incarnations"]:
        had = _read(row["settings"])
        # A later asyncrl may know fields that this start did not know.
        if had is None or not any(all(c.get(name, value) == value for name, value in had.items()) for c in of_configs):
            yield f"start {row['incarnation']} has settings that no configuration of the run has"


def redone_steps_have_the_same_settings(ledger: LedgerRows, _: Settings) -> Iterator[str]:
    """A training step is redone with the settings that it was first trained with."""
    starts = {row["incarnation"]: row for row in ledger.tables["incarnations"]}
    fixed: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for batch in ledger.tables["batches"]:
        if batch["outcome"] == "applied":
            fixed[batch["b"]].append(batch)
    for number, start in starts.items():
        for b in range(max(0, start["start_batch"]), min(start["next_batch"], max(fixed, default=-1) + 1)):
            first = _first_trained(starts, [batch for batch in fixed[b] if batch["incarnation"] <= number], b)
            if first is not None and first["settings"] != start["settings"]:
                changed = differences(_read(first["settings"]) or {}, _read(start["settings"]) or {})
                yield f"start {number} redid batch {b} with other settings, on the same branch: {'; '.join(changed)}"


def _first_trained(
    starts: Mapping[int, dict[str, Any]], batches: Sequence[Mapping[str, Any]], b: int
) -> dict[str, Any] | None:
    """The start that first finished the latest of these, each of which was fixed as batch b."""
    if not batches:
        return None
    since = batches[-1]["incarnation"]
    return next((row for n, row in starts.items() if n >= since and row["next_batch"] > b), None)


def _read(text: str) -> dict[str, Any] | None:
    """None where it cannot be read."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return None


SETTINGS: tuple[Check, ...] = (settings_are_of_a_configuration, redone_steps_have_the_same_settings)
