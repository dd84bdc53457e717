"""What recorded turns cost (buffer.turns): simulated actors with `on` against `off`.

512 slots, whose turns of 400 tokens take four seconds; and the same with more slots (`--times`). The buffer has a core
of its own. `off` and `on` take turns, and which is first changes with each repeat. A slot that waits for an
acknowledgement generates nothing, so the cost is the share of tokens per second that `on` has less.

    python scripts/bench/turns.py      # 17 minutes; bench/results/turns.json, a table for docs/how-to/long-episodes.md

`cost` is the mean over the repeats of 1 - on / off, with the half-width of its 95% confidence interval (Student's t).
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from intervals import T_95
from results import finish, keep
from scale import machine
from simulated_actors import Found, leave_to_the_buffer, measured

OUT = Path(__file__).parents[2] / "bench" / "results" / "turns.json"
ACTORS, SLOTS = 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 16], help=f"of {ACTORS * SLOTS} slots")
    parser.add_argument("--repeats", type=int, default=5, help="of each, 2 to 10")
    parser.add_argument("--turn-s", type=float, default=4.0)
    parser.add_argument("--speed", type=float, default=100.0, help="tokens per second of one episode")
    parser.add_argument("--tokens", type=float, default=2000.0, help="mean length of an episode")
    parser.add_argument("--sigma", type=float, default=0.3, help="of the log-normal lengths")
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=32.0, help="length of a window")
    parser.add_argument("--warm-up", type=float, default=12.0)
    parser.add_argument("--buffer-core", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if not 2 <= options.repeats <= 10:
        parser.error(f"--repeats {options.repeats}: expected 2 to 10")
    leave_to_the_buffer(options.buffer_core)
    options.processes = len(os.sched_getaffinity(0))
    rows: list[Found] = []
    found = {"machine": machine(), "options": vars(options) | {"out": str(options.out)}, "rows": rows}
    for times in options.times:
        options.slots = times * SLOTS
        for repeat in range(options.repeats):
            for turns in ("off", "on")[:: 1 if repeat % 2 == 0 else -1]:
                options.turns = turns
                row = {"times": times, "turns": turns, "repeat": repeat} | measured(ACTORS, options, options.seconds)
                rows.append(row)
                keep(options.out, found)
                print(line(row), flush=True)
    found["costs"] = costs = [cost(times, rows) for times in options.times]
    finish(options.out, found)
    print("\n" + markdown(found["machine"], costs))


def line(row: Found) -> str:
    tokens, offered = row["tokens_per_s"], row["offered_tokens_per_s"]
    return (
        f"x{row['times']:<3} {row['turns']:3}  {tokens:9.0f} of {offered:9.0f} tokens/s  "
        f"put {row['trajectories_per_s']:6.1f}/s {row['put_ms']} ms  records {row['records_per_s']:7.1f}/s "
        f"{row['turn_ms']} ms  cores: buffer {row['buffer_cores']:.3f}, simulating {row['simulating_cores']:.3f}"
    )


def cost(times: int, rows: list[Found]) -> dict[str, Any]:
    """Of that many times the slots; pairs are of the same repeat."""
    off, on = ([r for r in rows if (r["times"], r["turns"]) == (times, turns)] for turns in ("off", "on"))
    shares = [1 - b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(off, on, strict=True)]
    half = T_95[len(shares)] * statistics.stdev(shares) / len(shares) ** 0.5
    means = {
        f"{name}_{turns}": statistics.mean(r[name] for r in of)
        for name in ("tokens_per_s", "buffer_cores", "simulating_cores")
        for turns, of in (("off", off), ("on", on))
    }
    return {
        "times": times,
        "slots": times * ACTORS * SLOTS,
        "cost": statistics.mean(shares),
        "cost_half_width": half,
        "records_per_s": statistics.mean(r["records_per_s"] for r in on),
        "record_ms": [statistics.median(r["turn_ms"][i] for r in on) for i in range(2)],
        "offered_tokens_per_s": off[0]["offered_tokens_per_s"],
        **means,
    }


def markdown(where: str, costs: list[dict[str, Any]]) -> str:
    lines = [
        f"{where}\n",
        "| slots | records per second | recorded, median and p99 [ms] | tokens per second without waiting, off, on | "
        "cost | buffer's cores, off, on | simulating cores, off, on |",
        "| ---: | ---: | --- | --- | --- | --- | --- |",
    ]
    for c in costs:
        median, tail = c["record_ms"]
        lines.append(
            f"| {c['slots']} | {c['records_per_s']:.0f} | {median:.3g}, {tail:.3g} | {c['offered_tokens_per_s']:.0f}, "
            f"{c['tokens_per_s_off']:.0f}, {c['tokens_per_s_on']:.0f} | {c['cost']:.2%} ± {c['cost_half_width']:.2%} | "
            f"{c['buffer_cores_off']:.2f}, {c['buffer_cores_on']:.2f} | {c['simulating_cores_off']:.2f}, "
            f"{c['simulating_cores_on']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
