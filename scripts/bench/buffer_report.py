"""What the benchmark of the buffer prints, and the targets that its figures are held against.

python scripts/bench/buffer_report.py [RESULTS]   prints tables for docs/explanation/performance.md
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AIM = (4096, 8)
"""Tokens and producers of the cell that the targets are about."""
Found = dict[str, Any]


def targets(results: dict[str, Any]) -> list[Found]:
    """What is aimed at, beside what was measured: rates in MB/s of the same cell, one figure per repeat, of which the
    median is held against the target. Redis's AOF everysec promises what `fsync: interval` does: at a power cut the
    last second is lost. `commit` promises more."""
    rates: dict[str, list[float]] = {}
    for row in results["throughput"]:
        if (row["tokens"], row["producers"]) == AIM and "missing" not in row:
            rates.setdefault(row["what"], []).append(row["bytes"] / 1e6 / row["in"]["seconds"])
    ours = {fsync: rates.get(f"asyncrl, fsync {fsync}", []) for fsync in ("commit", "interval")}
    found = []
    for mode, rival, least in (("commit", "disk, sequential", 0.5), ("interval", "Redis streams", 1.5)):
        ratios = [a / b for a, b in zip(ours[mode], rates.get(rival, []), strict=False)]
        found.append({"what": f"fsync {mode} / {rival}", "measured": ratios, "at least": least})
    ratios = [a / b for a, b in zip(ours["commit"], rates.get("Redis streams", []), strict=False)]
    found.append({"what": "fsync commit / Redis streams", "measured": ratios, "at least": 1.5})
    for row in results["latency"]:
        what = f"put at {row['per_s']}/s, fsync {row['fsync']}, p99 in ms"
        found.append({"what": what, "measured": [row["p99_ms"]], "at most": 50 + row["commit_ms"]})
    what = f"seconds to restart with {results['restart']['groups']} waiting groups"
    found.append({"what": what, "measured": [results["restart"]["seconds"]], "at most": 5})
    room = [
        row["rss_peak_mb"] / (2 * row["bytes"] / 1e6 + 200) for row in results["throughput"] if "rss_idle_mb" in row
    ]
    found.append({"what": "peak RSS / (2 * payloads + 200 MB)", "measured": [max(room, default=0)], "at most": 1})
    return found


def line(row: Found) -> str:
    head = f"{row['tokens']:>6} {row['producers']:>4}  {row['what']:<24}"
    if "missing" in row:
        return f"{head}{row['missing']}"
    parts = []
    for way in ("in", "out"):
        if way in row:
            n, s = row["trajectories"], row[way]["seconds"]
            cpu = f"{1e6 * row[way]['cpu_s'] / n:>8.0f}" if "cpu_s" in row[way] else f"{'-':>8}"
            clients = f"{1e6 * row[way]['clients_cpu_s'] / n:>6.0f}" if "clients_cpu_s" in row[way] else ""
            if way == "in":
                clients = clients or f"{'-':>6}"
            parts.append(f"{n / s:>9.0f}{row['bytes'] / 1e6 / s:>8.0f}{cpu}{clients}")
    peak = f"{row['rss_peak_mb']:>8.0f}" if "rss_peak_mb" in row else ""
    return head + "  ".join(parts) + peak


def show(results: dict[str, Any]) -> None:
    into = f"{'in: traj/s':>9}{'MB/s':>7}{'us CPU':>8} clients"
    print(f"\n{'tokens':>6} {'from':>4}  {'':<24}{into}   out: traj/s, MB/s, us CPU; peak MB")
    for row in results["throughput"]:
        print(line(row))
    for row in results["latency"]:
        print(
            f"put at {row['per_s']}/s, fsync {row['fsync']}: p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms, "
            f"max {row['max_ms']:.1f} ms (commit interval {row['commit_ms']:g} ms)"
        )
    for row in results["producer"]:
        parts = ", ".join(f"{name} {us:.0f} us" for name, us in row.items() if name != "tokens")
        print(f"a client's CPU per trajectory of {row['tokens']} tokens: {parts}")
    r = results["restart"]
    print(f"restart with {r['groups']} waiting groups of {r['group_size']}: {r['seconds']:.2f} s, {r['rss_mb']:.0f} MB")
    print()
    for what, figures, aim, verdict in verdicts(results):
        print(f"{what:<52}{figures:<18} {aim}  {verdict}".rstrip())


def verdicts(results: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Target, what was measured, what was aimed at, held or missed."""
    for row in results["targets"]:
        least = "at least" in row
        bound = row["at least" if least else "at most"]
        middle = statistics.median(row["measured"] or [0.0])
        held = bool(row["measured"]) and (middle >= bound if least else middle <= bound)
        figures = " ".join(f"{x:.2f}" for x in row["measured"]) or "not measured"
        aim = f"{'at least' if least else 'at most'} {bound:g}"
        yield row["what"], figures, aim, ("held" if held else "MISSED") if row["measured"] else ""


def page(results: dict[str, Any]) -> None:
    """One line per cell, the median of its repeats; then the targets."""
    print(
        "| tokens | producers | | in: trajectories/s | MB/s | us CPU | clients | out: trajectories/s | MB/s | us CPU |"
    )
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    cells: dict[tuple[int, int, str], list[Found]] = {}
    for row in results["throughput"]:
        cells.setdefault((row["tokens"], row["producers"], row["what"]), []).append(row)
    for (tokens, producers, what), rows in cells.items():
        parts = [str(tokens), str(producers), what]
        for way, cpus in (("in", ("cpu_s", "clients_cpu_s")), ("out", ("cpu_s",))):
            found = [row for row in rows if way in row]
            rate = _median(row["trajectories"] / row[way]["seconds"] for row in found)
            parts += [rate, _median(row["bytes"] / 1e6 / row[way]["seconds"] for row in found)]
            for name in cpus:
                has = [row for row in found if name in row[way]]
                parts.append(_median(1e6 * row[way][name] / row["trajectories"] for row in has))
        print(f"| {' | '.join(parts)} |")
    print("\n| target, 4096 tokens, 8 producers | measured | target | |\n| --- | ---: | ---: | --- |")
    for what, figures, aim, verdict in verdicts(results):
        print(f"| {what} | {figures} | {aim} | {verdict.lower()} |")


def _median(numbers: Iterator[float]) -> str:
    found = list(numbers)
    return f"{statistics.median(found):.0f}" if found else ""


if __name__ == "__main__":
    default = Path(__file__).parents[2] / "bench" / "results" / "buffer.json"
    page(json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else default).read_text()))
