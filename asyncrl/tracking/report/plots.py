"""Draws one panel as a PNG, with matplotlib but without a window or global state."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from asyncrl.tracking.report.panels import Panel, members
from asyncrl.tracking.series import BUCKETS, SERIES, find
from asyncrl.tracking.state import Record

INCHES, DPI = (5.4, 3.0), 120
INSIDE = (0.135, 0.15, 0.84, 0.74)
"""Position of the axes: fixed, because matplotlib draws everything twice to compute it."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#8c8c8c")
"""The Okabe-Ito palette, which colour-blind readers can tell apart."""
SMOOTHED = (
    "reward/mean", "reward/success", "throughput/tokens_generated_per_s", "throughput/tokens_trained_per_s",
)  # fmt: skip
POINTS = "reward/held_out"
"""How the names of series begin that have few values, which are drawn as points."""
AXIS = {"step": "training step", "wall_s": "seconds", "tokens": "tokens trained"}


def names(records: Iterable[Record]) -> set[str]:
    """Every series that occurs."""
    return {name for record in records for name in record}


def draw(panel: Panel, records: Sequence[Record], known: set[str]) -> bytes | None:
    """The PNG; None if the run has none of the panel's series."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [name for wanted in panel.series for name in members(wanted, known)]
    curves = {name: _curve(name, panel.x, records) for name in shown}
    curves = {name: (x, y) for name, (x, y) in curves.items() if len(x) and not _idle(name, y, panel.stacked)}
    if not curves:
        return None
    figure = Figure(figsize=INCHES, dpi=DPI)
    axes = figure.add_axes(INSIDE)
    if panel.stacked:
        _stack(axes, panel, records, list(curves))
    else:
        _lines(axes, curves, panel.log)
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(AXIS[panel.x], fontsize=9)
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1 or not SERIES.keys() & curves.keys():
        axes.legend(fontsize=7.5, frameon=panel.stacked, framealpha=0.85, ncols=2 if len(curves) > 4 else 1)
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Exponential mean, corrected for its start: each new value weighs `1 - weight` in the long run.

    >>> smooth([1.0, 1.0, 1.0], 0.9)
    [1.0, 1.0, 1.0]
    """
    mean, out = 0.0, []
    for i, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        out.append(mean / (1 - weight**i))
    return [round(v, 12) for v in out]


def _curve(name: str, axis: str, records: Sequence[Record]) -> tuple[list[float], list[float]]:
    points = [(r[axis], r[name]) for r in records if axis in r and math.isfinite(r.get(name, math.nan))]
    return [x for x, _ in points], [y for _, y in points]


def _idle(name: str, values: Sequence[float], stacked: bool) -> bool:
    """Leaves out members of a family that are always 0 (a reason for which nothing was dropped), and layers of half a
    percent."""
    series = find(name)
    return series is not None and series.family and max(map(abs, values)) <= (0.005 if stacked else 0.0)


def _lines(axes: Any, curves: dict[str, tuple[list[float], list[float]]], log: bool) -> None:
    for i, (name, (x, y)) in enumerate(curves.items()):
        colour, label = COLOURS[i % len(COLOURS)], _label(name)
        if name.startswith(POINTS):
            axes.plot(x, y, "o", ms=6, color=colour, label=label, zorder=5)
        elif name == "staleness/bound":
            axes.plot(x, y, "--", color="#222", linewidth=1.2, label="bound", zorder=4)
        elif name in SMOOTHED and len(y) > 10:
            axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.35)
            axes.plot(x, smooth(y, 0.7), color=colour, linewidth=1.8, label=label)
        else:
            axes.plot(x, y, color=colour, linewidth=1.4, label=label, marker="o" if len(x) == 1 else None)
    if log:
        axes.set_yscale("log")
    elif all(v >= 0 for _, y in curves.values() for v in y):
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # a curve that hovers must not look like one that jumps


def _stack(axes: Any, panel: Panel, records: Sequence[Record], shown: Sequence[str]) -> None:
    rows = [r for r in records if any(name in r for name in shown)]
    heights = [[_finite(r.get(name, 0.0)) for r in rows] for name in shown]
    labels = [_label(name) for name in shown]
    axes.stackplot([r[panel.x] for r in rows], heights, labels=labels, colors=COLOURS, alpha=0.85, linewidth=0)
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    if panel.unit.startswith("share"):
        axes.set_ylim(top=1)


def _label(name: str) -> str:
    """The shortest name that tells the curves of one panel apart."""
    last = name.rsplit("/", 1)[1]
    if last in BUCKETS:
        return "staleness " + last.replace("_up", " and more").replace("_", "-")
    return last.removesuffix("_per_s").removesuffix("_s").replace("_", " ")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
