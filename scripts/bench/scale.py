"""1 to 512 simulated actors against one real buffer process on this machine, and a simulated learner.

An actor holds `--slots` episodes at once. An episode of n tokens takes n / `--speed` seconds and is then put, as real
actors put it; lengths are log-normal, with a long tail. There is no engine and no model: the actors only sleep, ask for
tickets, and put. The learner takes batch after batch, as fast as there are any, and every batch is a new version. All
of it goes through the sockets, the ledger and the disk that a run uses.

    trajectories/s   put and acknowledged, in a window after the warm-up; what the actors would have made is `offered`
    put              from the call to the acknowledgement, median and 99th percentile
    batch            a batch that is complete, asked for once more: the buffer's own time and the way
    turn             with `--turns on`: the same for each recorded sample and answer (buffer.turns)
    staleness        the largest of any trajectory in any batch; the bound is `--max-staleness`
    memory           of the buffer at the window's begin and end; cores of it, and of those that simulate

What recorded turns cost is measured by turns.py, with the same actors.

Where the buffer takes a whole core, it is saturated; where those that simulate do, they are. From the buffer's CPU per
trajectory follows how many GPUs one buffer carries. For memory there is one longer window (`--long`), whose slope is
said. Prints what docs/explanation/scaling.md takes, as markdown; writes bench/results/scale.json. As it stands: five
minutes.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

from results import finish, keep
from simulated_actors import Found, leave_to_the_buffer, measured

ROOT = Path(__file__).parents[2]
GPUS, GPU_TOKENS_PER_S = 1000, 1670
"""What 1,000 GPUs generate: 20 MB/s of trajectories at 12 bytes a token."""
MEMORY_ACTORS = 128
SATURATED = 0.8
"""Of what the actors would make, if put and tickets cost nothing: below it something is in their way."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="*", default=[1, 8, 32, 128, 256, 512])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--speed", type=float, default=1000.0, help="tokens per second of one episode")
    parser.add_argument("--tokens", type=float, default=2000.0, help="mean length of an episode")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal lengths")
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of the window")
    parser.add_argument("--warm-up", type=float, default=8.0)
    parser.add_argument("--long", type=float, default=75.0, help="length of one more window, at 128 actors, for memory")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that simulate")
    parser.add_argument("--turn-s", type=float, default=0.0, help="seconds of one turn; 0: an episode is one turn")
    parser.add_argument("--turns", choices=["on", "off"], default="off", help="buffer.turns: each is recorded")
    parser.add_argument("--buffer-core", type=int, help="only the buffer runs on this core; default: not bound")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "scale.json")
    options = parser.parse_args()
    leave_to_the_buffer(options.buffer_core)
    rows: list[Found] = []
    found = {"machine": machine(), "options": vars(options) | {"out": str(options.out)}, "rows": rows}
    for actors in options.actors:
        rows.append(measured(actors, options, options.seconds))
        keep(options.out, found)
        print(line(rows[-1]), flush=True)
    if options.long:
        found["memory"] = measured(MEMORY_ACTORS, options, options.long)
        print(line(found["memory"]), flush=True)
    found["estimate"] = estimate(rows, options.tokens)
    finish(options.out, found)
    print("\n" + markdown(found))


def estimate(rows: list[Found], tokens: float) -> Found:
    """How far one buffer goes, from its CPU per trajectory where it had most to do."""
    busiest = max(rows, key=lambda r: r["trajectories_per_s"])
    needed = GPUS * GPU_TOKENS_PER_S / tokens
    of_a_core = 1e6 / busiest["buffer_us_per_trajectory"]
    return {
        "gpus": GPUS,
        "tokens_per_gpu_and_s": GPU_TOKENS_PER_S,
        "needed_trajectories_per_s": needed,
        "seen_trajectories_per_s": busiest["trajectories_per_s"],
        "of_one_core_trajectories_per_s": of_a_core,
        "gpus_of_one_buffer_seen": GPUS * busiest["trajectories_per_s"] / needed,
        "gpus_of_one_buffer_at_a_whole_core": GPUS * of_a_core / needed,
    }


def markdown(found: Found) -> str:
    """What docs/explanation/scaling.md takes."""
    head = (
        "| actors | offered, put [trajectories/s] | put, median and p99 [ms] | batch of | asked for again, median and "
        "p99 [ms] | largest staleness | buffer's cores | us CPU per trajectory | RSS, MB |"
    )
    lines = [head, "| ---: | ---: | --- | ---: | --- | ---: | ---: | ---: | --- |"]
    for r in found["rows"]:
        put, batch = (", ".join(f"{ms:.4g}" for ms in r[name]) for name in ("put_ms", "batch_ms"))
        lines.append(
            f"| {r['actors']} | {r['offered_per_s']:.0f}, {r['trajectories_per_s']:.0f} | {put} | "
            f"{r['batch_trajectories']} | {batch} | {r['staleness_max']} | {r['buffer_cores']:.2f} | "
            f"{r['buffer_us_per_trajectory']:.0f} | {r['rss_mb'][0]:.0f} to {r['rss_mb'][1]:.0f} |"
        )
    e, over = found["estimate"], [r for r in found["rows"] if r["trajectories_per_s"] < SATURATED * r["offered_per_s"]]
    if over:
        r = over[0]
        lines.append(
            f"\nFrom {r['actors']} actors on less is put than offered ({r['trajectories_per_s']:.0f} of "
            f"{r['offered_per_s']:.0f} a second), because of {in_the_way(r, found['options']['processes'])}."
        )
    else:
        lines.append(f"\nNot saturated: every row put at least {SATURATED} of what was offered.")
    if m := found.get("memory"):
        lines.append(
            f"\nMemory, {m['actors']} actors for {found['options']['long']:.0f} s: {m['rss_mb'][0]:.0f} to "
            f"{m['rss_mb'][1]:.0f} MB; in the second half {m['rss_mb_per_minute']:+.2f} MB a minute, while "
            f"{m['trajectories_per_s'] * found['options']['long'] / 2:.0f} trajectories went through."
        )
    lines.append(
        f"\n1,000 GPUs at {e['tokens_per_gpu_and_s']} tokens a second and 2000 tokens an episode make "
        f"{e['needed_trajectories_per_s']:.0f} trajectories/s. Seen: {e['seen_trajectories_per_s']:.0f} a second, "
        f"{e['gpus_of_one_buffer_seen']:.0f} GPUs. A whole core at the CPU per trajectory of that row would carry "
        f"{e['of_one_core_trajectories_per_s']:.0f} a second: {e['gpus_of_one_buffer_at_a_whole_core']:.0f} GPUs."
    )
    return "\n".join([f"{found['machine']}\n", *lines])


def in_the_way(r: Found, processes: int) -> str:
    cores = f"{r['buffer_cores']:.2f} cores, the simulation {r['simulating_cores']:.2f}"
    if r["buffer_cores"] > SATURATED:
        return f"the buffer: it took {cores}"
    if r["simulating_cores"] > SATURATED * processes:
        return f"those that simulate, not the buffer: it took {cores}"
    return f"neither's CPU (the buffer took {cores}): other processes, or the bound on what is in flight"


def line(r: Found) -> str:
    return (
        f"{r['actors']:4} actors  offered {r['offered_per_s']:7.1f}/s  put {r['trajectories_per_s']:7.1f}/s  "
        f"put {r['put_ms']} ms  batch of {r['batch_trajectories']} {r['batch_ms']} ms  versions {r['versions']}  "
        f"staleness {r['staleness_max']}  {r['dropped']}  cores: buffer {r['buffer_cores']:.2f}, simulating "
        f"{r['simulating_cores']:.2f}  {r['buffer_us_per_trajectory']:.0f} us  RSS {r['rss_mb'][0]:.0f} -> "
        f"{r['rss_mb'][1]:.0f} MB"
    )


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
