"""Shows the run on the terminal: a live view, or one plain line per step if the output is not a terminal."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.align import Align
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.tracking.advice import advice
from asyncrl.tracking.report.chosen import sentences
from asyncrl.tracking.series import BUCKETS
from asyncrl.tracking.state import GREEDY, HELD_OUT, SAMPLED, SHOWN, Event, Record, RunState
from asyncrl.tracking.terminal.view import RoleView, View, view

REFRESH_S = 0.5
SHOWN_EVENTS = {
    "restart",
    "joins",
    "cannot_join",
    "leaves",
    "exit",
    "failing",
    "eval_failed",
    "no_signal",
    "beyond_max_kept",
    "bound",
    "guard",
    "poison",
    "checkpoint",
    "stall",
    "resumed",
    "branch",
    "skipped",
}
"""Events that are shown as a line; the others are in events.jsonl."""

_BLOCKS = "▁▂▃▄▅▆▇█"


def render(view: View) -> RenderableType:
    """The live view, at least 80 columns wide."""
    parts = [_progress(view), Text(), _numbers(view), Text(), _roles(view.roles)]
    parts += [Text(), Text(view.advice, style="dim")] if view.advice else []
    body = Group(*parts)
    return Panel(body, title=f"[bold]asyncrl[/bold] · {view.name}", title_align="left", border_style="cyan")


def line(view: View, record: Record) -> str:
    """One training step, or one evaluation, as one plain line."""
    step = f"step {record['step']:.0f}/{view.steps}"
    if "weights/loss" not in record:
        return f"{step}  {_evaluated(record)}"
    parts = [step]
    if "reward/mean" in record:
        parts.append(f"reward {record['reward/mean']:.3f}")
    if SHOWN in record:
        parts.append(f"demonstrations {record[SHOWN]:.4f} nats")
    if "reward/success" in record:
        parts.append(f"success {record['reward/success']:.2f}")
    rates = (("generated", view.generated_per_s), ("trained", view.trained_per_s))
    known = " ".join(f"{_short(rate)} {what}" for what, rate in rates if rate is not None)
    parts += [f"tokens/s {known}"] if known else []
    if view.staleness_mean is not None:
        parts.append(f"staleness {view.staleness_mean:.2f} max {view.staleness_max or 0:.0f}")
    if view.fill is not None:
        parts.append(f"buffer {view.fill:.0%}")
    waits = sorted(
        ((n.removeprefix("waits/"), v) for n, v in record.items() if n.startswith("waits/") and v > 0.05),
        key=lambda item: -item[1],
    )
    parts += [f"waits {', '.join(f'{n} {v:.0%}' for n, v in waits[:3])}"] if waits else []
    parts += [f"left {_clock(view.left_s)}"] if view.left_s is not None else []
    return "  ".join(parts)


def end(summary: Mapping[str, Any], run: Path, advised: str = "") -> RenderableType:
    """The end of the output: the result of the run, what would make it faster, and its folder."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    start, last = summary.get("held_out_success_start"), summary.get("held_out_success_end")
    if start is not None:
        change = f"{start:.1%} → [bold green]{last:.1%}[/]" if last is not None else f"{start:.1%}"
        rows.add_row("held-out success", change + " at the training temperature")
        greedy, greedy_end = summary.get("held_out_success_greedy_start"), summary.get("held_out_success_greedy_end")
        if greedy is not None and greedy_end is not None:
            rows.add_row("", f"{greedy:.1%} → {greedy_end:.1%} greedy")
    rows.add_row("training steps", f"{summary['steps']} in {_clock(summary['wall_s'])}")
    rows.add_row(
        "tokens",
        f"{_short(summary['tokens_generated'])} generated, {_short(summary['tokens_trained'])} trained "
        f"({_short(summary['tokens_generated_per_s'])}/s, {_short(summary['tokens_trained_per_s'])}/s)",
    )
    for title, sentence in sentences(summary):
        rows.add_row(title, Text(sentence, overflow="fold"))
    rows.add_row("largest staleness", f"{summary['max_staleness_seen']} training steps")
    if summary.get("restarts"):
        rows.add_row("restarts", ", ".join(f"{role} {n}" for role, n in summary["restarts"].items()))
    if advised:
        rows.add_row("advice", Text(advised, overflow="fold"))
    rows.add_row("run folder", Text(str(run), style="bold", overflow="fold"))
    rows.add_row("report", Text(str(run / "report.html"), overflow="fold"))
    rows.add_row("read the rollouts", Text(f"asyncrl view {shlex.quote(str(run))}", overflow="fold"))
    outcome = str(summary.get("outcome", "finished"))
    colour = {"finished": "green", "interrupted": "yellow"}.get(outcome, "red")
    if summary.get("why"):
        rows.add_row(
            "why it ended" if outcome == "finished" else "why", Text(str(summary["why"]), style=colour, overflow="fold")
        )
    return Panel(rows, title=f"[bold]asyncrl[/bold] · {outcome}", title_align="left", border_style=colour)


class Screen(Console):
    """A console that outlives its reader (a `tee` that ended): the run goes on unseen, where rich would end the
    process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminal:
    """Draws the view during the run. Only this class knows about screens and time."""

    def __init__(self, console: Console, run_state: RunState, run: Path) -> None:
        self._console = console
        self._state = run_state
        self._run = run
        self._drawn = 0.0
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()

    def refresh(self, now: float) -> None:
        if self._live is not None and now - self._drawn >= REFRESH_S:
            self._drawn = now
            self._live.update(render(view(self._state, self._run.name, now)), refresh=True)

    def record(self, record: Record) -> None:
        if self._live is None:
            now = self._state.started + record.get("wall_s", time.time() - self._state.started)
            self._plain(line(view(self._state, self._run.name, now), record))

    def event(self, event: Event) -> None:
        if event.kind in SHOWN_EVENTS:
            fields = " ".join(f"{name}={value}" for name, value in event.fields.items() if value not in ("", None))
            self._plain(f"{event.kind}: {event.role} {fields}".rstrip())

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        advised = advice(list(self._state.recent), os.cpu_count())
        self._console.print(end(summary, self._run, advised))

    def _plain(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _progress(v: View) -> RenderableType:
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    left = "" if v.left_s is None else f"   [bold]{_clock(v.left_s)}[/] left"
    row.add_row(
        f"step [bold]{v.step}[/] / {v.steps}",
        ProgressBar(total=max(v.steps, 1), completed=v.step, complete_style="cyan", finished_style="green"),
        f"{_clock(v.wall_s)}{left}",
    )
    return row


def _numbers(v: View) -> RenderableType:
    columns = Table.grid(expand=True, padding=(0, 2))
    columns.add_column(ratio=1)
    columns.add_column(ratio=1)
    columns.add_row(Group(_reward(v), Text(), _throughput(v)), Group(_staleness(v), Text(), _buffer(v)))
    return columns


def _reward(v: View) -> RenderableType:
    rows = _rows()
    now = "-" if not v.rewards else f"[bold]{v.rewards[-1]:.3f}[/]"
    rows.add_row("reward", Text.from_markup(f"{now} ") + Text(sparkline(v.rewards, 24), style="green"))
    if v.success is not None:
        rows.add_row("success", f"{v.success:.2f}")
    for step, sampled, greedy in (v.held_out[:1] + v.held_out[-1:])[: len(v.held_out)]:
        rows.add_row(f"held-out @{step}", _held_out(sampled, greedy))
    return rows


def _throughput(v: View) -> RenderableType:
    rows = _rows()
    for what, rate, count in (("generated", v.generated_per_s, v.generated), ("trained", v.trained_per_s, v.trained)):
        rows.add_row(what, f"[bold]{_rate(rate)}[/] tokens/s" + (f"  [dim]{_short(count)} in all[/]" if count else ""))
    if v.ess is not None:
        rows.add_row("sample size", f"{v.ess:.1%} effective")
    return rows


def _staleness(v: View) -> RenderableType:
    rows = _rows()
    if v.staleness_mean is None:
        rows.add_row("staleness", f"-  [dim]bound {v.bound}[/]")
        return rows
    rows.add_row(
        "staleness", f"[bold]{v.staleness_mean:.2f}[/] mean, [bold]{v.staleness_max or 0:.0f}[/] max  "
        f"[dim]bound {v.bound}[/]",
    )  # fmt: skip
    last = max((i for i, share in enumerate(v.histogram) if share > 0), default=0)
    for name, share in list(zip(BUCKETS, v.histogram, strict=False))[: last + 1]:
        rows.add_row(f"{name.replace('_up', '+').replace('_', '-'):>9}", Text(_bar(share, 18), style="yellow"))
    return rows


def _buffer(v: View) -> RenderableType:
    rows = _rows()
    if v.fill is not None:
        rows.add_row("buffer", Text(_bar(v.fill, 18), style="magenta"))
    if v.groups:
        shown = ("in_flight", "waiting", "trained")
        groups = (f"{v.groups[state]:.0f} {state.replace('_', ' ')}" for state in shown if state in v.groups)
        rows.add_row("groups", ", ".join(groups))
    if v.dropped:
        rows.add_row("dropped", ", ".join(f"{n:.0f} {reason}" for reason, n in v.dropped.items()))
    return rows


def _roles(roles: Iterable[RoleView]) -> RenderableType:
    table = Table(expand=True, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("role", "now", "waited so far"):
        table.add_column(name, ratio=None if name == "role" else 1, no_wrap=True)
    table.add_column("cores", justify="right")
    table.add_column("memory", justify="right")
    for r in roles:
        restarts = f" [red]↻{r.restarts}[/]" if r.restarts else ""
        table.add_row(
            f"[bold]{r.role}[/]{restarts}", _doing(r), "  ".join(f"{c} {s:.0%}" for c, s in r.shares[:3]),
            "" if r.cpu is None else f"{r.cpu:.2f}", "" if r.rss_bytes is None else f"{r.rss_bytes / 2**20:.0f} MB",
        )  # fmt: skip
    return table if table.rows else Align.left(Text("starting the processes", style="dim"))


def _doing(r: RoleView) -> Text:
    if r.waiting is not None and r.waiting.cause == "start":
        return Text(f"starting {r.waiting.for_s:.1f} s", style="dim")
    if r.waiting is not None:
        on = f" ({r.waiting.on})" if r.waiting.on else ""
        style = "red" if r.waiting.for_s > 30 else "yellow"
        return Text(f"waits for {r.waiting.cause} {r.waiting.for_s:.1f} s{on}", style=style)
    return Text("works", style="green") if r.ready else Text("starting", style="dim")


def sparkline(values: Sequence[float], width: int) -> str:
    """All values in `width` columns, each the mean of its part of them.

    >>> sparkline([0, 1, 2, 3], 4)
    '▁▃▆█'
    """
    if not values:
        return ""
    width = min(width, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    return "".join(_BLOCKS[round((m - low) / ((high - low) or 1.0) * (len(_BLOCKS) - 1))] for m in means)


def _rows() -> Table:
    rows = Table.grid(padding=(0, 1))
    rows.add_column(style="dim", width=12, no_wrap=True)
    rows.add_column()
    return rows


def _evaluated(record: Record) -> str:
    """What one evaluation of one set found."""
    if success := _held_out(record.get(SAMPLED), record.get(GREEDY)):
        return f"held-out success {success}"
    for of_set in dict.fromkeys(name.split("/")[2] for name in record if name.startswith(f"{HELD_OUT}/")):
        of = (record.get(f"{HELD_OUT}/{of_set}/{way}") for way in ("sampled", "greedy"))
        if success := _held_out(*of):
            return f"held-out success of {of_set} {success}"
    return "no held-out episode was scored"


def _held_out(sampled: float | None, greedy: float | None) -> str:
    parts = [f"{value:.1%} {name}" for value, name in ((sampled, "sampled"), (greedy, "greedy")) if value is not None]
    return ", ".join(parts)


def _bar(share: float, width: int) -> str:
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full) + f" {share:.0%}"


def _rate(number: float | None) -> str:
    return "-" if number is None else _short(number)


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def _clock(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m:02}:{s:02}"
