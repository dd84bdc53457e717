"""Draws what the last `asyncrl plan` of a run has played: throughput against mean staleness, one point per setting."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.tracking.report.plots import COLOURS, DPI, INCHES, INSIDE


@dataclass(frozen=True, slots=True)
class Played:
    """Mean staleness and trained tokens/s: of each setting, of the front, and of those with a name."""

    points: Sequence[tuple[float, float]]
    front: Sequence[tuple[float, float]]
    """Fastest first."""
    named: Mapping[str, tuple[float, float]]


def read(path: Path) -> Played | None:
    """None: no plan was made of this run. Raises ValueError for a file that is none of `asyncrl plan`."""
    if not path.is_file():
        return None
    try:
        plan = json.loads(path.read_text())
        at = {_name(point["setting"]): _at(point) for point in plan["points"]}
        named = {name: _at(plan[name]) for name in ("recorded", "synchronous", "pick") if plan[name] is not None}
        return Played(list(at.values()), [at[_name(setting)] for setting in plan["front"]], named)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what asyncrl plan writes ({error!r}): make it again, or remove it") from error


def _name(setting: Mapping[str, Any]) -> str:
    return json.dumps(setting, sort_keys=True)


def _at(point: Mapping[str, Any]) -> tuple[float, float]:
    return float(point["mean"]["staleness_mean"]), float(point["mean"]["tokens_per_s"])


def draw(played: Played) -> bytes:
    """The PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI)
    axes = figure.add_axes(INSIDE)
    axes.plot(*zip(*played.points, strict=True), "o", ms=4, color=COLOURS[-1], label="played")
    axes.plot(*zip(*played.front, strict=True), "-", color=COLOURS[0], linewidth=1.4, label="front")
    for colour, size, (name, (staleness, rate)) in zip(COLOURS[1:], (11, 9, 7), played.named.items(), strict=False):
        axes.plot([staleness], [rate], "o", ms=size, color=colour, label=name, zorder=5)
    axes.set_title("plan", loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("mean staleness, in training steps", fontsize=9)
    axes.set_ylabel("trained tokens/s", fontsize=9)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7.5, frameon=False)
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()
