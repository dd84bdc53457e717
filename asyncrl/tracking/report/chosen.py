"""What a run chose by results of evaluations, and what it measured with the best weights: for report and summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncrl.run_folder import BEST

if TYPE_CHECKING:
    from pathlib import Path

    from asyncrl.config import Config
    from asyncrl.run_folder import RunFolder


def chosen(run: RunFolder, config: Config) -> dict[str, Any]:
    """chosen_by: the fields that each set decided; best, final: the contents of best.json and final.json. Empty: the
    configuration chooses nothing."""
    e, used = config.eval, dict[str, list[str]]()
    kept = [e.keep_best] if e.keep_best else []
    fields = {"stop_at": [*e.stop_at], "patience": [*e.patience], "keep_best": kept}
    for field, names in fields.items():
        for name in names:
            used.setdefault(name, []).append(f"eval.{field}")
    if not used:
        return {}
    return {"chosen_by": used, "best": _read(run.exports / BEST), "final": _read(run.final)}


def sentences(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, sentence) of each, from the fields of `chosen`."""
    said = []
    if used := summary.get("chosen_by"):
        sets = ", ".join(f"{name} ({', '.join(fields)})" for name, fields in used.items())
        said.append(("used for choosing", f"{sets}; success on a set that chose is higher than on one that did not"))
    if best := summary.get("best"):
        share = f"{best['keep_best']} {best['success']:.1%}"
        said.append(("best weights", f"version {best['version']}, {share}: exports/{best['export']}/hf{_better(best)}"))
    if final := summary.get("final"):
        ways = {way: by_source["all"] for way, by_source in final.items() if isinstance(by_source, dict)}
        shares = "; ".join(f"{way} {m['share']:.1%} ({m['low']:.1%} to {m['high']:.1%})" for way, m in ways.items())
        which = " that have an export" * bool(best and best.get("without_export"))
        said.append(("final", f"{final['set']} with the best weights{which}: {shares}"))
    return said


def notes(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, sentence) of how the run ended, and of what it chose."""
    why = [(f"run {summary.get('outcome')}", str(summary["why"]))] if summary.get("why") else []
    return why + sentences(summary)


def _better(best: Mapping[str, Any]) -> str:
    """Why better weights are not the ones that are named; empty: there are none."""
    if (top := best.get("without_export")) is None:
        return ""
    return (
        f"; version {top['version']} of branch {top['branch']} had {top['success']:.1%} and has no export: it was "
        "evaluated before eval.keep_best was set or its export is gone, and only a redo of its step writes one"
    )


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return None
