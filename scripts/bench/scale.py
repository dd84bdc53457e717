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
import asyncio
import math
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import needs
import numpy as np
import psutil
from results import finish, keep

from asyncrl.buffer.client import AsyncBufferClient, BufferClient
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.trajectory import CONTEXT, Row, Span, Ticket, Trajectory, TurnReward
from asyncrl.trajectory.turns import Recorded, RecordedAnswer, RecordedReset, RecordedSample, ids_digest
from asyncrl.wire.turns import tools_digest

ROOT = Path(__file__).parents[2]
GROUP_SIZE = 8
LONGEST = 16_384
PROMPT = 1 / 8
"""The share of an episode's tokens that is not sampled."""
GPUS, GPU_TOKENS_PER_S = 1000, 1670
"""What 1,000 GPUs generate: 20 MB/s of trajectories at 12 bytes a token."""
MEMORY_ACTORS = 128
START_S = 120.0
SATURATED = 0.8
"""Of what the actors would make, if put and tickets cost nothing: below it something is in their way."""
Found = dict[str, Any]


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


def measured(actors: int, options: argparse.Namespace, window_s: float) -> Found:
    at_once = actors * options.slots
    # Groups for more than the slots: those whose longest episode still runs must not hold up the others.
    groups = max(2, math.ceil(2.5 * at_once / (GROUP_SIZE * (options.max_staleness + 1))))
    config = Config.model_validate(
        {
            "learner": {"groups_per_step": groups, "group_size": GROUP_SIZE, "steps": 10**9},
            "buffer": {
                "capacity": 8 * at_once + 64 * GROUP_SIZE * groups,
                "max_staleness": options.max_staleness,
                "lease_s": 600.0,
                "max_disk_gb": 1000,
                "turns": options.turns,
            },
            "eval": {"tasks": 0},
            "env": {"max_tokens": LONGEST},
        }
    )
    context = multiprocessing.get_context("spawn")
    with started(config, options.buffer_core) as (run, buffer):
        version, go, stop = context.Value("i", 0), context.Event(), context.Event()
        results: Any = context.Queue()
        begun = context.Semaphore(0)
        signs = version, begun, go, stop, results
        learner = context.Process(target=learn, args=(run.path, *signs), daemon=True)
        shares = [range(i, actors, options.processes) for i in range(options.processes)]
        simulate = [
            context.Process(target=play, args=(run.path, share, vars(options), *signs), daemon=True)
            for share in shares
            if len(share)
        ]
        processes = [learner, *simulate]
        for process in processes:
            process.start()
        if not all(begun.acquire(timeout=START_S) for _ in processes):
            sys.exit(f"scale.py: a process that simulates did not begin within {START_S:.0f} s")
        time.sleep(options.warm_up)
        theirs = [psutil.Process(process.pid) for process in simulate]
        go.set()
        began, rss = time.perf_counter(), buffer.memory_info().rss
        cpu, simulated = sum(buffer.cpu_times()[:2]), sum(sum(p.cpu_times()[:2]) for p in theirs)
        resident = []
        while time.perf_counter() < began + window_s:
            time.sleep(min(1.0, max(0.0, began + window_s - time.perf_counter())))
            resident.append((time.perf_counter() - began, buffer.memory_info().rss / 1e6))
        seconds = time.perf_counter() - began
        cpu = sum(buffer.cpu_times()[:2]) - cpu
        simulated = sum(sum(p.cpu_times()[:2]) for p in theirs) - simulated
        rss_end = buffer.memory_info().rss
        stop.set()
        said = [results.get(timeout=120) for _ in processes]
        for process in processes:
            process.join(30)
        with closing(BufferClient(run.address("buffer"), identity="bench", deadline_s=60)) as client:
            status = client.status()
    puts = np.concatenate([s["puts"] for s in said if "puts" in s])
    turns = np.concatenate([s["turns"] for s in said if "turns" in s])
    learned = next(s for s in said if "batches" in s)
    return {
        "actors": actors,
        "offered_per_s": at_once * options.speed / options.tokens,
        "trajectories_per_s": len(puts) / seconds,
        "put_ms": quantiles(puts),
        "offered_tokens_per_s": at_once * options.speed * (1 - PROMPT),
        "tokens_per_s": sum(s["tokens"] for s in said if "tokens" in s) / seconds,
        "records_per_s": len(turns) / seconds,
        "turn_ms": quantiles(turns) if len(turns) else None,
        "batch_ms": quantiles(np.array(learned["batches"] or [math.nan])),
        "batch_trajectories": groups * GROUP_SIZE,
        "versions": learned["versions"],
        "staleness_max": learned["staleness"],
        "dropped": {k: v for k, v in status["equation"]["0"].items() if "dropped" in k or "stale" in k},
        "buffer_cores": cpu / seconds,
        "simulating_cores": simulated / seconds,
        "buffer_us_per_trajectory": 1e6 * cpu / max(1, len(puts)),
        "rss_mb": [rss / 1e6, rss_end / 1e6],
        "rss_mb_per_minute": slope(resident),
    }


def play(
    path: Path, mine: range, options: Found, version: Any, begun: Any, go: Event, stop: Event, results: Any
) -> None:
    """The actors of one process."""
    seen = Seen(go, stop)

    async def episode(client: AsyncBufferClient, name: str, ticket: Ticket, length: int, held: int) -> None:
        took = length / options["speed"]
        made = trajectory(ticket, name, length, held, turns_in(took, options))
        await acted(client, ticket, made, took / made.turns, seen)
        await seen.timed(client.put(made), seen.puts)

    async def actor(i: int) -> None:
        name, lengths = f"actor-{i}", np.random.default_rng(i)
        client = AsyncBufferClient(run.address("buffer"), identity=name, deadline_s=120)
        playing: set[asyncio.Task[None]] = set()
        await client.hello("actor")
        if i == mine[-1]:
            begun.release()
        while not stop.is_set():
            playing = {task for task in playing if not task.done()}
            free = options["slots"] - len(playing)
            tickets = []
            if free:
                held = version.value
                tickets = (await client.tickets(name, (0, held), free, [], 0.1)).tickets
            for ticket in tickets:
                length = int(min(max(lengths.lognormal(*shape(options)), 16), LONGEST))
                playing.add(asyncio.create_task(episode(client, name, ticket, length, held)))
            if not tickets:
                await asyncio.sleep(0.02)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await client.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(actor(i) for i in mine))

    run = RunFolder.existing(path)
    asyncio.run(all_of_them())
    results.put({"puts": np.array(seen.puts), "turns": np.array(seen.turns), "tokens": seen.tokens})


@dataclass
class Seen:
    """What the actors of a process did in the window."""

    go: Event
    stop: Event
    puts: list[float] = field(default_factory=list)
    """Seconds of each, as those of the recorded turns."""
    turns: list[float] = field(default_factory=list)
    tokens: int = 0
    """Sampled."""

    async def timed(self, sent: Coroutine[Any, Any, str], seconds: list[float]) -> None:
        """Waits for the acknowledgement; notes how long that took."""
        began = time.perf_counter()
        await sent
        if self._in_window():
            seconds.append(time.perf_counter() - began)

    def sampled(self, tokens: int) -> None:
        self.tokens += tokens if self._in_window() else 0

    def _in_window(self) -> bool:
        return self.go.is_set() and not self.stop.is_set()


def turns_in(seconds: float, options: Found) -> int:
    """Turns of an episode that takes so long."""
    return max(1, round(seconds / options["turn_s"])) if options["turn_s"] else 1


async def acted(client: AsyncBufferClient, ticket: Ticket, made: Trajectory, turn_s: float, seen: Seen) -> None:
    """The turns of an episode, in the time that they take; those of a durable ticket are recorded."""
    for record in records(made):
        if isinstance(record, RecordedSample):
            await asyncio.sleep(turn_s)
            seen.sampled(len(record.token_ids))
        if ticket.durable:
            await seen.timed(client.turn(ticket.id, ticket.attempt, record), seen.turns)


def shape(options: Found) -> tuple[float, float]:
    """(mu, sigma) of the log-normal of that mean."""
    return math.log(options["tokens"]) - options["sigma"] ** 2 / 2, options["sigma"]


def trajectory(ticket: Ticket, name: str, length: int, held: int, turns: int) -> Trajectory:
    """Its sampled tokens are divided among so many turns."""
    first = int(length * PROMPT)
    turns = min(turns, length - first)
    edges = np.linspace(first, length, turns + 1).astype(int).tolist()
    mask = np.arange(length) >= first
    row = Row(
        np.arange(length, dtype=np.int32),
        mask,
        np.where(mask, np.float32(-0.5), np.float32(0)),
        np.where(mask, held, CONTEXT).astype(np.int32),
    )
    reward = float(ticket.id.index % 2)
    task = str(ticket.task["id"])
    spans = [Span(0, start, end - start) for start, end in pairwise(edges)]
    earned = tuple(TurnReward(reward / turns, (span,)) for span in spans) if turns > 1 else ()
    about = (turns, "done")
    made = Trajectory(ticket.id, ticket.attempt, "train", name, task, "fake", (row,), reward, {}, *about)
    return replace(made, turn_rewards=earned)


def records(made: Trajectory) -> Iterator[Recorded]:
    """What an actor records of that episode: its reset, and each turn's sample and answer, with 1 kB of text."""
    (row,) = made.rows
    message = [{"role": "tool", "content": "x" * 1000}]
    yield RecordedReset(message, tools_digest([]))
    first = int(len(row) * PROMPT)
    spans = [turn.spans[0] for turn in made.turn_rewards] or [Span(0, first, len(row) - first)]
    for number, span in enumerate(spans):
        of = slice(span.start, span.start + span.tokens)
        tokens = (row.token_ids[of], row.logprobs[of], row.versions[of])
        yield RecordedSample(number, *tokens, stop_reason="stop", prompt=ids_digest([number]))
        yield RecordedAnswer(number, message, made.reward / made.turns, number + 1 == len(spans))


def learn(path: Path, version: Any, begun: Any, go: Event, stop: Event, results: Any) -> None:
    run = RunFolder.existing(path)
    batches: list[float] = []
    staleness = versions = b = 0
    with closing(BufferClient(run.address("buffer"), identity="learner", deadline_s=120)) as buffer:
        incarnation = buffer.start(0, 0, None).incarnation
        buffer.published(incarnation, 0, 0, "0")
        begun.release()
        while not stop.is_set():
            reply = buffer.batch(incarnation, b, 0, 1, wait_s=0.5)
            if reply.state != "ready":
                continue
            began = time.perf_counter()
            again = buffer.batch(incarnation, b, 0, 1, wait_s=0.5)
            if go.is_set():
                batches.append(time.perf_counter() - began)
                versions += 1
            staleness = max(staleness, *(again.version - t.oldest_version for t in again.trajectories))
            now = buffer.finished(incarnation, b, "applied")
            buffer.published(incarnation, 0, now, str(now))
            version.value = now
            b += 1
    results.put({"batches": batches, "staleness": staleness, "versions": versions})


def leave_to_the_buffer(core: int | None) -> None:
    """Run on the other cores, with all that this process starts but the buffer."""
    if core is None:
        return
    needs.program("taskset", of="scale.py", remedy="install util-linux, or leave out --buffer-core")
    others = os.sched_getaffinity(0) - {core}
    if not others:
        sys.exit(f"--buffer-core {core} leaves no core to those that simulate: leave it out")
    os.sched_setaffinity(0, others)


@contextmanager
def started(config: Config, core: int | None) -> Iterator[tuple[RunFolder, psutil.Process]]:
    """The buffer process, bound to that core."""
    work = Path(tempfile.mkdtemp(prefix="asyncrl-scale-"))
    run = RunFolder.create(work / "run", config)
    bound = [] if core is None else ["taskset", "-c", str(core)]
    with (work / "log").open("ab") as log:
        process = subprocess.Popen([*bound, sys.executable, "-m", "asyncrl.buffer", str(run.path)], stderr=log)
    try:
        with closing(BufferClient(run.address("buffer"), identity="bench", deadline_s=120)) as client:
            client.status()
        yield run, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)
        run.remove_temporary()
        shutil.rmtree(work, ignore_errors=True)


def slope(resident: list[tuple[float, float]]) -> float:
    """MB per minute, over the second half: the first fills queues and caches."""
    half = np.array(resident[len(resident) // 2 :])
    return 60 * float(np.polyfit(half[:, 0], half[:, 1], 1)[0]) if len(half) > 2 else math.nan


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


def quantiles(seconds: np.ndarray) -> list[float]:
    return [round(1e3 * float(np.quantile(seconds, q)), 2) for q in (0.5, 0.99)] if len(seconds) else []


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
