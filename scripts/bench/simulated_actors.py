"""Simulated actors and a simulated learner against a real buffer process, for scale.py and turns.py. Without an engine
or a model, they sleep, ask for tickets, and put."""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import os
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

from asyncrl.buffer.client import AsyncBufferClient, BufferClient
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.trajectory import CONTEXT, Row, Span, Ticket, Trajectory, TurnReward
from asyncrl.trajectory.turns import Recorded, RecordedAnswer, RecordedReset, RecordedSample, ids_digest
from asyncrl.wire.turns import tools_digest

GROUP_SIZE = 8
LONGEST = 16_384
PROMPT = 1 / 8
"""The share of an episode's tokens that is not sampled."""
START_S = 120.0
Found = dict[str, Any]


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
            sys.exit(f"a process that simulates did not begin within {START_S:.0f} s")
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


def quantiles(seconds: np.ndarray) -> list[float]:
    return [round(1e3 * float(np.quantile(seconds, q)), 2) for q in (0.5, 0.99)] if len(seconds) else []
