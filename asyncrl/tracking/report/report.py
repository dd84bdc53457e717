"""`report.html` of a run, from its metrics.jsonl and events.jsonl: numbers, the bias of dropping, and curves."""

from __future__ import annotations

import base64
import html
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from asyncrl.tracking import bound_events
from asyncrl.tracking.advice import advice
from asyncrl.tracking.report import pareto
from asyncrl.tracking.report.panels import DASHBOARD, Panel
from asyncrl.tracking.report.plots import draw, names
from asyncrl.tracking.series import FATES, STOP_REASONS
from asyncrl.tracking.sinks import jsonl
from asyncrl.tracking.slowest import environments, tools
from asyncrl.tracking.state import GREEDY, SAMPLED, Record

if TYPE_CHECKING:
    from asyncrl.run_folder import RunFolder

FIRST = ("reward", "throughput", "staleness", "ess", "waits_learner", "waits_actor")
"""The curves on the first screen."""

MOST_TOOLS = 10
"""Tools in the table of the slowest."""

AGAIN = "<code>asyncrl report RUN</code> draws them all."

PLAN = "plan"
"""The picture of what `asyncrl plan` has played."""

Tile = tuple[str, str]
"""Title and value, as HTML."""


def write_report(
    run: RunFolder, over: Callable[[], bool] = lambda: False, notes: Sequence[tuple[str, str]] = ()
) -> int:
    """Write `report.html`, one self-contained page, and `plots/*.png`. Raises ValueError for unreadable metrics.

    Once `over` is true no further plot is drawn: the page says so. Returns how many panels were left out for that.
    `notes`: title and sentence of what is said first.
    """
    records = jsonl.by_step(run.metrics)
    run.plots.mkdir(exist_ok=True)
    recorded = names(records)
    pictures: dict[str, str] = {}
    panels = sorted((p for each in DASHBOARD.values() for p in each), key=lambda p: p.slug not in FIRST)
    left_out = 0
    for panel in panels:
        if over():
            left_out += 1
        elif (png := draw(panel, records, recorded)) is not None:
            (run.plots / f"{panel.slug}.png").write_bytes(png)
            pictures[panel.slug] = base64.b64encode(png).decode()
    temporary = run.report.with_suffix(".html.part")
    said = [*notes, *bound_events.note(run.path / "events.jsonl")]
    try:
        played = pareto.read(run.plan)
    except ValueError as error:
        said.append(("plan", str(error)))
    else:
        if played is not None:
            (run.plots / f"{PLAN}.png").write_bytes(png := pareto.draw(played))
            pictures[PLAN] = base64.b64encode(png).decode()
    temporary.write_text(page(run.name, records, pictures, left_out, said))
    temporary.replace(run.report)
    return left_out


def page(
    name: str,
    records: Sequence[Record],
    pictures: dict[str, str],
    left_out: int = 0,
    notes: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole page. `pictures`: base64 PNG by panel. `left_out`: panels that were not drawn for lack of time.
    `notes`: title and sentence of each."""
    body = [f"<h1><span>asyncrl</span> {html.escape(name)}</h1>"]
    body += [f"<p><b>{html.escape(title)}</b>: {html.escape(sentence)}</p>" for title, sentence in notes]
    body += _first_screen(records, pictures, left_out)
    for title, panels in DASHBOARD.items():
        rest = [p for p in panels if p.slug not in FIRST and p.slug in pictures]
        if rest:
            body.append(f"<h2>{html.escape(title)}</h2>" + _grid(rest, pictures))
    if PLAN in pictures:
        shown = f"<div class=grid><img alt='plan' src='data:image/png;base64,{pictures[PLAN]}'></div>"
        body.append(f"<h2>asyncrl plan</h2>{shown}")
    body.append("<footer>Every series is explained in docs/reference/series.md. Data: metrics.jsonl.</footer>")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>asyncrl {html.escape(name)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style><main>{''.join(body)}</main></html>\n"
    )


def _first_screen(records: Sequence[Record], pictures: dict[str, str], left_out: int) -> list[str]:
    if not records:
        return ["<p>No training step was recorded.</p>"]
    by_slug = {panel.slug: panel for panels in DASHBOARD.values() for panel in panels}
    missing = f"<p>{left_out} curves were left out: drawing took too long, or was interrupted. {AGAIN}</p>"
    advised = advice(records, os.cpu_count())
    return [
        *[missing] * bool(left_out),
        _numbers(records),
        *[f"<p>{html.escape(advised)}</p>"] * bool(advised),
        _bias(records[-1] if "buffer/count/generated" in records[-1] else _merged(records)),
        _slowest(_merged(records)),
        _grid([by_slug[slug] for slug in FIRST], pictures),
    ]


def _numbers(records: Sequence[Record]) -> str:
    last = _merged(records)
    wall_s = max(last["wall_s"], 1e-9)
    tiles = [
        _success("sampled", [r[SAMPLED] for r in records if SAMPLED in r]),
        _success("greedy", [r[GREEDY] for r in records if SAMPLED in r and GREEDY in r]),
        ("training steps", f"<b>{records[-1]['step']:.0f}</b>"),
        ("wall clock", f"<b>{wall_s / 60:.1f}</b> min"),
        _rate("generated", last.get("throughput/tokens_generated"), wall_s),
        _rate("trained", last.get("throughput/tokens_trained"), wall_s),
        _ended_by(last),
        _largest_staleness(records, last.get("staleness/bound", math.nan)),
    ]
    shown = "".join(f"<div><small>{tile[0]}</small>{tile[1]}</div>" for tile in tiles if tile is not None)
    return f"<div class=tiles>{shown}</div>"


def _success(how: str, values: Sequence[float]) -> Tile | None:
    if not values:
        return None
    first = f"{values[0]:.1%} &rarr; " if len(values) > 1 else ""
    return f"held-out success, {how}", f"{first}<b>{values[-1]:.1%}</b>"


def _rate(what: str, tokens: float | None, wall_s: float) -> Tile | None:
    return None if tokens is None else (f"tokens/s {what}", f"<b>{tokens / wall_s:,.0f}</b>")


def _ended_by(last: Record) -> Tile | None:
    """What ended the episodes of the last step."""
    shares = {reason: last.get(f"reward/stopped/{reason}", 0.0) for reason in STOP_REASONS}
    parts = [f"{reason} {share:.0%}" for reason, share in shares.items() if share]
    return ("episodes ended by (last step)", f"<b>{', '.join(parts)}</b>") if parts else None


def _largest_staleness(records: Sequence[Record], bound: float) -> Tile | None:
    values = [r["staleness/max"] for r in records if math.isfinite(r.get("staleness/max", math.nan))]
    return ("largest staleness", f"<b>{max(values):.0f}</b> of {bound:.0f}") if values else None


def _bias(last: Record) -> str:
    """Means over generated, trained and dropped trajectories: a staleness policy that starves long episodes shows."""
    counts = {fate: last.get(f"buffer/count/{fate}", 0.0) for fate in FATES}
    if not counts["generated"]:
        return ""
    rows = [_row("trajectories", [f"{counts[fate]:,.0f}" for fate in FATES], "")]
    for label, what, form in (
        ("length, tokens", "length", ".1f"),
        ("turns", "turns", ".2f"),
        ("reward", "reward", ".3f"),
    ):
        means = [last.get(f"buffer/{what}/{fate}", math.nan) for fate in FATES]
        rows.append(_compared(label, means, form, counts))
    prefix = "buffer/env_count/generated/"
    for env in sorted(n.removeprefix(prefix) for n in last if n.startswith(prefix)):
        shares = [last.get(f"buffer/env_count/{fate}/{env}", 0.0) / max(counts[fate], 1.0) for fate in FATES]
        rows.append(_compared(f"environment {html.escape(env)}", shares, ".1%", counts))
    head = "".join(f"<th>{h}</th>" for h in ("", *FATES, "trained against generated"))
    return (
        "<h2>What dropping does to the data</h2><p>Means over the run. If what is trained differs from what was "
        f"generated, the staleness policy chooses the data.</p><table><tr>{head}</tr>{''.join(rows)}</table>"
    )


def _slowest(last: Record) -> str:
    """Environments and tools by the seconds that episodes spent in them; those of the run's last processes."""
    inside, called = environments(last), tools(last)
    if not inside:
        return ""
    total = max(sum(used.seconds for used in inside), 1e-9)
    rows = "".join(
        f"<tr><td>{what} {html.escape(used.name)}</td><td>{used.times:,.0f}</td><td>{used.mean_s:.3g}</td>"
        f"<td>{used.seconds / total:.1%}</td></tr>"
        for what, found in (("environment", inside), ("tool", called[:MOST_TOOLS]))
        for used in found
    )
    return (
        "<h2>Where the time of episodes goes</h2><p>An environment is counted by episodes, a tool by calls, which may "
        "overlap. What is left of an episode is generation and waiting.</p><table><tr><th></th><th>times</th>"
        f"<th>seconds each</th><th>share of the seconds in environments</th></tr>{rows}</table>"
    )


def _compared(label: str, by_fate: Sequence[float], form: str, counts: Mapping[str, float]) -> str:
    """One row; a dash where there is no value, or no trajectory with this fate."""
    values = [value if counts[fate] else math.nan for value, fate in zip(by_fate, FATES, strict=True)]
    return _row(label, ["-" if math.isnan(v) else format(v, form) for v in values], _shift(*values[:2]))


def _row(label: str, values: Sequence[str], shift: str) -> str:
    return f"<tr><td>{label}</td>" + "".join(f"<td>{v}</td>" for v in values) + f"<td>{shift}</td></tr>"


def _shift(generated: float, trained: float) -> str:
    if not generated or math.isnan(generated) or math.isnan(trained):
        return ""
    change = trained / generated - 1
    return f"<span class={'bad' if abs(change) > 0.05 else 'good'}>{change:+.1%}</span>"


def _merged(records: Sequence[Record]) -> Record:
    """The latest value of every series."""
    merged: Record = {}
    for record in records:
        merged |= record
    return merged


def _grid(panels: Sequence[Panel], pictures: dict[str, str]) -> str:
    return (
        "<div class=grid>"
        + "".join(
            f"<img alt='{html.escape(p.title)}' src='data:image/png;base64,{pictures[p.slug]}'>"
            for p in panels
            if p.slug in pictures
        )
        + "</div>"
    )


_STYLE = """
body{margin:0;background:#f6f7f9;color:#1d2330;font:15px/1.5 system-ui,-apple-system,'DejaVu Sans',sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px}
h1{font-size:26px;margin:0 0 16px}h1 span{color:#0072b2}h2{font-size:18px;margin:28px 0 6px}p{margin:0 0 8px;color:#566}
.tiles{display:flex;flex-wrap:wrap;gap:12px}
.tiles div{background:#fff;border:1px solid #e3e6ea;border-radius:10px;padding:8px 16px;font-size:17px}
.tiles small{display:block;color:#667;font-size:12px}.tiles b{font-size:20px}
table{border-collapse:collapse;background:#fff;border:1px solid #e3e6ea;border-radius:10px}
td{font-variant-numeric:tabular-nums}
th,td{padding:5px 18px;text-align:right;border-bottom:1px solid #eef0f3}th{font-weight:600;color:#566}
td:first-child,th:first-child{text-align:left}.good{color:#00794f}.bad{color:#c0392b;font-weight:600}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(380px,1fr));gap:14px;margin-top:14px}
.grid img{width:100%;background:#fff;border:1px solid #e3e6ea;border-radius:10px}footer{margin:30px 0;color:#778}
"""
