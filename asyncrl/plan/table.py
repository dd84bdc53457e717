"""What `asyncrl plan` says: a table, sentences, lines of the configuration, JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from asyncrl.config import Config
from asyncrl.plan.fitting.fit import Fit
from asyncrl.plan.grid import AS_GOOD, Grid, Point
from asyncrl.plan.playing.outcome import Outcome
from asyncrl.plan.setting import FIELDS, config_with

_HEAD = (
    "actors", "ranks", "slots", "groups", "bound", "every", "sampler", "s/step", "tokens/s", "learner waits",
    "slots idle", "staleness", "max", "dropped", ""
)  # fmt: skip


def checked(fit: Fit, played: Outcome) -> str:
    """How well the recorded setting is played again."""
    m = fit.measured
    parts = [f"{played.step_s:.3g} s a step" + (f" (measured {m.step_s:.3g})" if m.step_s else "")]
    parts.append(
        f"staleness {played.staleness_mean:.2f}" + (f" ({m.staleness:.2f})" if m.staleness is not None else "")
    )
    parts.append(f"dropped {played.dropped:.1%}" + (f" ({m.dropped:.1%})" if m.dropped is not None else ""))
    source = f"fitted to {m.episodes} episodes and {m.steps} training steps"
    return f"{source}; the recorded setting, played: {', '.join(parts)}"


def far_off(fit: Fit, played: Outcome) -> str:
    """A warning where the recorded setting itself is not met; empty: it is."""
    step_s = fit.measured.step_s
    if not step_s or abs(played.step_s / step_s - 1) <= 0.15:
        return ""
    return (
        f"warning: the play of the recorded setting is {played.step_s / step_s - 1:+.0%} off its measured seconds per "
        "step, so take differences below that as unknown. Other load on the machine, evaluations and a policy that "
        "changes its lengths are not in the model."
    )


def table(grid: Grid) -> str:
    """One line per setting, fastest first; numbers are means over the seeds."""
    rows = [_HEAD, *(_row(p, grid) for p in sorted(grid.points, key=lambda p: -p.rate))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _row(p: Point, grid: Grid) -> tuple[str, ...]:
    s = p.setting
    marks = [name for name, point in (("recorded", grid.base), ("pick", grid.pick)) if point.setting == s]
    marks += ["front"] * any(point.setting == s for point in grid.front)
    return (
        str(s.actors), str(s.ranks), str(s.value("slots")), str(s.groups_per_step), str(s.value("max_staleness")),
        str(s.every), s.sampler,
        f"{p.mean('step_s'):.3g}", f"{p.rate:.0f}", f"{p.mean('learner_waits'):.0%}", f"{p.mean('slots_idle'):.0%}",
        f"{p.staleness:.2f}", f"{max(o.staleness_max for o in p.outcomes)}", f"{p.mean('dropped'):.1%}",
        " ".join(marks),
    )  # fmt: skip


def verdict(grid: Grid, config: Config) -> list[str]:
    """The recommendation in sentences."""
    base, pick = grid.base, grid.pick
    sure = max(pick.spread("tokens_per_s"), base.spread("tokens_per_s"))
    lines = []
    if pick.setting == base.setting:
        lines.append(f"keep the recorded setting: no other is more than {AS_GOOD:.0%} faster, or fresher at its speed")
    else:
        lines.append(
            f"pick: {', '.join(f'{k} {v}' for k, v in pick.setting.changes(base.setting).items())}: "
            f"{pick.rate / base.rate - 1:+.0%} trained tokens/s, staleness {base.staleness:.2f} -> "
            f"{pick.staleness:.2f}, dropped {base.mean('dropped'):.1%} -> {pick.mean('dropped'):.1%}"
        )
    if pick.setting.ranks != base.setting.ranks:
        lines.append(
            "ranks are taken to share a batch without loss: what they tell each other, and the optimizer's part of a "
            "step, were not measured with another number of them"
        )
    lines.append(_who_waits(pick))
    lines += _on_synchronous(grid, sure)
    lines += _more_actors(grid)
    bias = pick.mean("length_bias")
    if abs(bias) > 0.02:
        direction = "longer" if bias > 0 else "shorter"
        lines.append(f"dropping makes trained episodes {abs(bias):.1%} {direction} on average")
    rules_disk = _disk(pick, config)
    lines.append(
        f"buffer: at most {pick.mean('live_trajectories'):.0f} trajectories in flight or waiting, "
        f"{_bytes(pick.mean('live_bytes'))} of payloads; {rules_disk} on the disk between checkpoints"
    )
    lines.append(
        f"how sure: over {len(pick.outcomes)} seeds, with the recorded episodes drawn again, the throughput of the "
        f"pick varies by {pick.spread('tokens_per_s'):.1%} and its staleness by {pick.spread('staleness_mean'):.1%}"
    )
    return lines


def _who_waits(p: Point) -> str:
    learner, idle = p.mean("learner_waits"), p.mean("slots_idle")
    if learner < 0.05 and idle < 0.05:
        return "neither side waits: generation and training are equally fast"
    side = "generation" if learner >= idle else "training"
    return (
        f"{side} is the slower side: the learner waits {learner:.0%} of the time, slots are idle for {idle:.0%} of it"
    )


def _on_synchronous(grid: Grid, sure: float) -> list[str]:
    synchronous, pick = grid.synchronous, grid.pick
    if synchronous is None or synchronous.setting == pick.setting:
        return ["synchronous training (bound 0) is the pick"] if synchronous is not None else []
    loss = 1 - synchronous.rate / pick.rate
    if loss <= max(AS_GOOD, sure):
        return [
            f"synchronous training (bound 0) is as good: its throughput differs by {-loss:+.1%}, which is within "
            f"{max(AS_GOOD, sure):.1%}, and nothing is stale"
        ]
    return [f"synchronous training (bound 0) would cost {loss:.0%} of the throughput"]


def _more_actors(grid: Grid) -> list[str]:
    """What more actors would bring to the recorded setting."""
    base, lines = grid.base, []
    for p in grid.points:
        if list(p.setting.changes(base.setting)) == [FIELDS["actors"]] and p.setting.actors > base.setting.actors:
            lines.append(f"{p.setting.actors} actors instead of {base.setting.actors}: {p.rate / base.rate - 1:+.0%}")
    return lines


def _disk(p: Point, config: Config) -> str:
    held = config.learner.keep_checkpoints * config.learner.checkpoint_every
    held = config.learner.steps if config.buffer.keep == "all" else min(config.learner.steps, held)
    needed = p.mean("bytes_per_step") * held + p.mean("live_bytes")
    over = needed > 0.8 * config.buffer.max_disk_gb * 1e9
    return f"about {_bytes(needed)}" + (
        f" (buffer.max_disk_gb is {config.buffer.max_disk_gb:g}: too little)" if over else ""
    )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def changed_config(config: Config, grid: Grid) -> tuple[dict[str, Any], Config]:
    """The fields that the pick changes, and the configuration with them. Raises ConfigError."""
    changes = grid.pick.setting.changes(grid.base.setting)
    if FIELDS["actors"] in changes:
        changes[FIELDS["actors"]] += config.actors.eval
    changed = config_with(config, changes)
    if changed.buffer.capacity != config.buffer.capacity:
        changes["buffer.capacity"] = changed.buffer.capacity
    return changes, changed


def paste(changes: dict[str, Any]) -> str:
    """The changed fields as YAML to paste."""
    sections: dict[str, list[str]] = {}
    for path, value in changes.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, []).append(f"  {name}: {value}")
    return "\n".join(line for section, lines in sections.items() for line in (f"{section}:", *lines))


def as_json(fit: Fit, grid: Grid, changes: dict[str, Any]) -> dict[str, Any]:
    return {
        "measured": asdict(fit.measured),
        "engine": asdict(fit.times.engine), "learner": asdict(fit.times.learner), "engine_error": fit.engine_error,
        "recorded": _point(grid.base), "pick": _point(grid.pick), "changes": changes,
        "synchronous": _point(grid.synchronous) if grid.synchronous is not None else None,
        "front": [asdict(p.setting) for p in grid.front],
        "points": [_point(p) for p in grid.points],
        "refused": [{"setting": asdict(s), "why": why} for s, why in grid.refused.items()],
    }  # fmt: skip


def _point(p: Point) -> dict[str, Any]:
    names = [f.name for f in fields(Outcome) if f.name not in ("batches", "stuck")]
    return {
        "setting": asdict(p.setting), "seeds": len(p.outcomes),
        "mean": {name: p.mean(name) for name in names},
        "spread": {name: p.spread(name) for name in ("tokens_per_s", "staleness_mean", "step_s")},
    }  # fmt: skip
