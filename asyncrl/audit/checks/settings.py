"""Training steps were redone with the settings that they were first trained with, or on a branch of their own."""

from __future__ import annotations

import json
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
    for start in ledger.tables["incarnations"]:
        for batch in _trained(ledger, start):
            first = ledger.trained_by(batch["serial"])
            if first is not None and first["settings"] != start["settings"]:
                changed = differences(_read(first["settings"]) or {}, _read(start["settings"]) or {})
                yield (
                    f"start {start['incarnation']} redid batch {batch['b']} with other settings, on the same branch: "
                    f"{'; '.join(changed)}"
                )


def _trained(ledger: LedgerRows, start: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The batches that this start trained on or redid: of several with one number the latest that it can know."""
    known: dict[int, dict[str, Any]] = {}
    for batch in ledger.tables["batches"]:
        if batch["incarnation"] <= start["incarnation"] and start["start_batch"] <= batch["b"] < start["next_batch"]:
            known[batch["b"]] = batch
    yield from (batch for batch in known.values() if batch["outcome"] == "applied")


def _read(text: str) -> dict[str, Any] | None:
    """None where it cannot be read."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return None


SETTINGS: tuple[Check, ...] = (settings_are_of_a_configuration, redone_steps_have_the_same_settings)
