"""A table as Markdown: for each task and arm the mean over the seeds with its interval, and the difference from the
first arm, paired by seed. Pure.

The intervals of differences are corrected for their number (Bonferroni): of k arms beside the first, each has the level
1 - 0.05 / k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from learning.declared import Table
from learning.measures import LEVEL, MEASURES, agree, bootstrap


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
    head = ["arm", "seeds", *(name for m in table.measures for name in (m, f"{m} - {table.arms[0].name}"))]
    lines = [_line(head), _line(["---"] * len(head))]
    base = {row["seed"]: row for row in rows if row["arm"] == table.arms[0].name}
    for arm in table.arms:
        mine = {row["seed"]: row for row in rows if row["arm"] == arm.name}
        if mine:
            cells = [
                cell for m in table.measures for cell in _cells(table, m, mine, None if arm is table.arms[0] else base)
            ]
            lines.append(_line([f"`{arm.name}`", str(len(mine)), *cells]))
    return lines


def _cells(
    table: Table, measure: str, mine: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]] | None
) -> tuple[str, str]:
    """The mean with its interval, and the same of the differences from `base`; `*` where all seeds agree in sign."""
    value = MEASURES[measure]
    absolute = str(bootstrap([value(row) for row in mine.values()]))
    differences = [value(mine[seed]) - value(base[seed]) for seed in mine if seed in base] if base else []
    if not differences:
        return absolute, ""
    together = len(differences) > 1 and agree(differences)
    return absolute, f"{bootstrap(differences, level(table))}{' *' if together else ''}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
