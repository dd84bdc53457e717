"""A table as Markdown: for each task and arm the mean over the seeds with its interval, and the difference from the
first arm, or the one that it names, paired by seed; of what it took to get somewhere, the quotient
(`measures.QUOTIENTS`). Pure.

The intervals of differences and quotients are corrected for their number (Bonferroni): of k arms beside the first, each
has the level 1 - 0.05 / k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from learning.declared import Table
from learning.measures import LEVEL, MEASURES, QUOTIENTS, agree, bootstrap


def markdown(table: Table, rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"\n{table.question}\n"]
    for task in table.tasks:
        mine = [row for row in rows if row["task"] == task]
        if mine:
            lines += [f"**{task}**\n", *_of_task(table, mine), ""]
    seconds = [sum(row.get(name, 0) for row in rows) / 60 for name in ("wall_s", "cpu_s")]
    return "\n".join([*lines, f"{len(rows)} runs, {seconds[0]:.1f} minutes, {seconds[1]:.1f} of them on a core"])


def level(table: Table) -> float:
    """Of the interval of one difference."""
    return 1 - (1 - LEVEL) / max(1, len(table.arms) - 1)


def _of_task(table: Table, rows: Sequence[dict[str, Any]]) -> list[str]:
    first = table.arms[0].name
    others = any(arm.against for arm in table.arms)
    columns = [name for m in table.measures for name in (m, _compared(m, "other" if others else first))]
    head = ["arm", *(["other"] if others else []), "seeds", *columns]
    lines = [_line(head), _line(["---"] * len(head))]
    found = {arm.name: {row["seed"]: row for row in rows if row["arm"] == arm.name} for arm in table.arms}
    for arm in table.arms:
        mine, other = found[arm.name], "" if arm.name == first else arm.against or first
        if mine:
            cells = [cell for m in table.measures for cell in _cells(table, m, mine, found.get(other))]
            lines.append(_line([f"`{arm.name}`", *([other] if others else []), str(len(mine)), *cells]))
    return lines


def _cells(
    table: Table, measure: str, mine: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]] | None
) -> tuple[str, str]:
    """The mean with its interval, and the same of the differences from `base` or of the quotients; `*` where all seeds
    agree in sign, of quotients in the side of 1."""
    value = MEASURES[measure]
    absolute = str(bootstrap([value(row) for row in mine.values()]))
    pairs = [(value(mine[seed]), value(base[seed])) for seed in mine if seed in base] if base else []
    if not pairs:
        return absolute, ""
    compared = [of_base / own if measure in QUOTIENTS else own - of_base for own, of_base in pairs]
    together = len(pairs) > 1 and agree([own - of_base for own, of_base in pairs])
    return absolute, f"{bootstrap(compared, level(table))}{' *' if together else ''}"


def _compared(measure: str, base: str) -> str:
    return f"{base} / arm" if measure in QUOTIENTS else f"{measure} - {base}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
