"""`asyncrl audit`: collect the independent records of a run, compare them, print counts and verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from asyncrl.audit import export
from asyncrl.audit.checks import Violation, listed, violations
from asyncrl.audit.export import write_parquet
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.summary import Figures, figures
from asyncrl.audit.witnesses import gather
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder

Format = Literal["text", "json", "parquet"]
SHOWN = 20
"""Violations printed as text; JSON has all of them."""


def audit(run: RunFolder, *, step: int | None = None, format: Format = "text", out: Path | None = None) -> int:
    """Print the audit, or write it to `out` (default for parquet: audit.parquet in the run folder).

    Returns the exit code: 1 if a witness contradicts another. Raises RunError or ConfigError if one cannot be read.
    """
    config = run.load_config()
    with closing(PayloadFiles(run.ledger(config) / "payloads")) as payloads:
        evidence = gather(run, config, payloads)
        if step is not None:
            trained = export.of_step(evidence, step)
            shown = export.demonstrations_of_step(evidence, step)
            lines = [*(_step_lines(step, trained, config) if trained else ()), *_shown_lines(step, shown)]
            _write(trained or shown, "\n".join(lines), format, out, run)
            return 0
        violated = list(violations(evidence))
    about = figures(evidence)
    verdict: dict[str, Any] = {
        "run": str(run.path),
        "holds": not violated,
        "violations": [asdict(v) for v in violated],
        "checks": listed(),
    }
    lines = [*_lines(run, about, config), "", *_verdict(violated)]
    if format == "parquet":
        _write(export.of_run(evidence), "", format, out, run)
        print("\n".join(_verdict(violated)))
    else:
        _write(verdict | asdict(about), "\n".join(lines), format, out, run)
    return 1 if violated else 0


def _write(data: Any, text: str, format: Format, out: Path | None, run: RunFolder) -> None:
    if format == "parquet":
        path = out or run.path / "audit.parquet"
        write_parquet(data, path)
        print(f"{len(data)} rows in {path}")
        return
    if format == "json":
        text = json.dumps(data, indent=1)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n")


def _lines(run: RunFolder, f: Figures, config: Config) -> Iterator[str]:
    n = f.witnesses
    yield f"run               {run.path}"
    yield f"ledger            {n['groups']} groups, {n['trajectories']} trajectories, {n['batches']} batches"
    yield f"data seed         {config.data.seed}: {n['draws']} draws made again from it"
    if n["demonstrations"]:
        yield f"demonstrations    {n['demonstrations']} taken, of {n['demonstration_rows']} rows"
    yield f"actors' logs      {n['acknowledgements']} acknowledgements of {_some(n['actors'], 'actor')}"
    yield f"learner's lists   {n['listed_batches']} batches in {_some(n['checkpoints'], 'checkpoint')}"
    yield f"payloads          {n['payloads_kept']} decoded, {n['payloads_reclaimed']} reclaimed"
    yield ""
    yield from _equation(f)
    yield f"batches           {_listed(f.outcomes)}"
    yield f"uses              {_listed(f.uses, '{1} groups {0}x')} (at most {config.buffer.max_uses})"
    yield f"staleness         {_listed(f.staleness, 'age {}: {}')} (uses; at most {_bound(config, f)})"
    if f.bounds:
        yield f"bounds            {_listed(f.bounds, '{1} batches {0}')} (buffer.max_staleness: auto)"
    if f.slots:
        yield f"slots             {_listed(f.slots, '{1} batches {0}')} (launch.tuning: auto)"
    yield f"attempts          {_listed(f.attempts)}"
    if f.turns:
        yield f"recorded turns    {_listed(f.turns)} (samples and answers, by what became of them)"
    yield f"other puts        {_listed(f.puts)}"
    yield f"lost, allowed     {_listed(f.lost)}; stored and in no actor's log {f.unlogged}"
    if f.lost_turns:
        more = f" and {len(f.lost_turns) - SHOWN} more (--format json lists them)" if len(f.lost_turns) > SHOWN else ""
        yield f"lost turns        host {len(f.lost_turns)}: {'; '.join(f.lost_turns[:SHOWN])}{more}"
    yield ""
    yield from _bias(f)


def _equation(f: Figures) -> Iterator[str]:
    for branch, counts in f.equation.items():
        dropped = {name: k for name, k in counts.items() if name.startswith("dropped")}
        parts = [
            f"{state.replace('_', ' ')} {counts[state]}" for state in ("in_flight", "waiting", "assigned", "trained")
        ]
        parts.append(f"dropped {sum(dropped.values())}")
        yield f"branch {branch:<10} issued {counts['issued']} = {' + '.join(parts)}"
        for name, k in dropped.items():
            yield f"{'':<18}{name.removeprefix('dropped: ')} {k}"


def _bias(f: Figures) -> Iterator[str]:
    yield f"{'trajectories':<18}{'count':>8}{'length':>9}{'turns':>8}{'reward':>9}  environments"
    for fate, b in f.bias.items():
        means = (
            f"{b['length']:>9.1f}{b['turns']:>8.2f}{b['reward']:>9.3f}" if b["count"] else f"{'-':>9}{'-':>8}{'-':>9}"
        )
        yield f"{fate:<18}{b['count']:>8}{means}  {_listed(b['environments'])}".rstrip()


def _bound(config: Config, f: Figures) -> str:
    return f"the bound of each batch, {config.buffer.staleness_limit}" if f.bounds else str(config.buffer.max_staleness)


def _verdict(violated: list[Violation]) -> Iterator[str]:
    if not violated:
        yield "audit: every witness agrees"
        return
    yield f"audit: VIOLATION of {violated[0]}"
    for violation in violated[1:SHOWN]:
        yield f"  also {violation}"
    if len(violated) > SHOWN:
        yield f"  and {len(violated) - SHOWN} more (--format json lists them)"


def _step_lines(step: int, trained: list[dict[str, Any]], config: Config) -> Iterator[str]:
    batch, version = trained[0]["batch"], trained[0]["version"]
    yield f"step {step}: batch {batch}, trained on version {version}, {len(trained)} trajectories"
    yield f"fixed {_time(trained[0]['fixed_at'])}, finished {_time(trained[0]['finished_at'])}"
    yield (
        f"{'trajectory':<14}{'actor':<12}{'staleness':>9}{'weight':>9}{'reward':>8}{'tokens':>8}{'turns':>6}"
        f"{'played':>9}{'waited':>9}  versions"
    )
    for row in trained:
        name = f"{row['branch']}.{row['group']}.{row['index']}"
        weight = "-" if row["importance_weight"] is None else f"{row['importance_weight']:.4f}"
        versions = " ".join(f"{v}:{k}" for v, k in zip(row["versions"], row["version_tokens"], strict=True))
        yield (
            f"{name:<14}{row['actor']:<12}{row['staleness']:>9}{weight:>9}{row['reward']:>8.3f}"
            f"{row['policy_tokens']:>8}{row['turns']:>6}{_seconds(row['issued_at'], row['received_at']):>9}"
            f"{_seconds(row['received_at'], row['fixed_at']):>9}  {versions}"
        )
    yield ""
    yield "weight: the mean importance weight of a trajectory's tokens, from the learner's list in its next checkpoint"
    yield "played, waited: seconds from its ticket's issue to its receipt, and from there until the batch was fixed"
    yield "versions: policy version that sampled, and how many tokens"


def _shown_lines(step: int, shown: list[dict[str, Any]]) -> Iterator[str]:
    if shown:
        yield f"step {step}: {len(shown)} demonstrations, in the order in which they were trained on"
    for row in shown:
        yield f"draw {row['draw']:<8} {row['where']}  {row['digest']}"


def _time(at: float | None) -> str:
    return "-" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _seconds(begin: float | None, end: float | None) -> str:
    return "-" if begin is None or end is None else f"{end - begin:.2f}"


def _listed(counts: Mapping[str, Any], form: str = "{} {}") -> str:
    return ", ".join(form.format(name, n) for name, n in counts.items()) or "none"


def _some(n: int, thing: str) -> str:
    return f"{n} {thing}{'' if n == 1 else 's'}"
