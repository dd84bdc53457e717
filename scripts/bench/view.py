"""What reading rollouts costs: to open a large run in a browser, to the learner that samples, to a buffer that is read.

    open      a run of 10,000 trajectories, in a real browser: from the navigation until its table is drawn
    learner   `Samples.take` on the learner's thread and the work of its own thread, beside a batch of the size given
    buffer    puts of trajectories per second into a real buffer process, alone and while a viewer refreshes its table
              and reads trajectories, in turns within one run

`open` needs a browser (Debian: chromium) and websockets; without one the row is left out. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from asyncrl.buffer.client import BatchReply
from asyncrl.config.launch import TrackingConfig
from asyncrl.learner.batch import flatten
from asyncrl.learner.reporting.samples import Samples
from asyncrl.learner.step.record import Record
from asyncrl.learner.step.train_step import StepResult
from asyncrl.model import load_tokenizer
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.rollouts.text import token_text
from asyncrl.trajectory import CONTEXT, Row, TicketId, Trajectory
from asyncrl.view import source
from asyncrl.view.run import ViewedRun
from asyncrl.view.server import Server

sys.path.insert(0, str(Path(__file__).parents[2]))  # for what the tests share with this script

from tests.buffer.processes import BufferProcess
from tests.view.browser import Browser, found
from tests.view.made_run import TEXT, MadeRun


def open_(folder: Path, trajectories: int, repeats: int) -> dict[str, Any]:
    made = MadeRun(folder / "large", group_size=8, groups_per_step=25, steps=1000)
    while len(made.put) < trajectories:
        made.step()
    run = ViewedRun(made.close(), text=TEXT)
    browser = Browser(folder / "browser")
    opened, cpu = [], []
    try:
        for _ in range(repeats):
            begun = time.process_time()
            fresh = ViewedRun(made.run, text=TEXT)
            read_s = time.process_time() - begun
            server = Server([fresh], 0)
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                before = time.process_time() + browser.cpu_s()
                browser.open(server.url)
                cpu.append(time.process_time() + browser.cpu_s() - before)
                shown = browser.js("shown.length")
                opened.append((read_s, browser.js("Number(document.documentElement.dataset.opened)") / 1000))
                begun = time.perf_counter()
                browser.js("$('f-env').value = 'search'; $('f-env').dispatchEvent(new Event('input'))")
                filtered_s = time.perf_counter() - begun
            finally:
                server.shutdown()
                server.server_close()
                fresh.close()
    finally:
        browser.close()
        run.close()
    return {
        "trajectories": shown,
        "cpu_of_reading_the_ledger_s": _spread([read for read, _ in opened]),
        "navigation_to_table_s": _spread([shown_s for _, shown_s in opened]),
        "cpu_of_server_and_browser_s": _spread(cpu),
        "one_filter_s": filtered_s,
        "load": os.getloadavg()[0],
    }


def learner(folder: Path, groups: int, size: int, tokens: int, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    vocabulary = 60
    from asyncrl.config import Config

    tokenizer = load_tokenizer(Config.model_validate({"model": {"path": "quickstart"}}).model)

    def trajectory(group: int, index: int) -> Trajectory:
        mask = np.arange(tokens) >= tokens // 4
        row = Row(
            rng.integers(0, vocabulary, tokens).astype(np.int32),
            mask,
            np.where(mask, -0.5, 0).astype(np.float32),
            np.where(mask, 0, CONTEXT).astype(np.int32),
        )
        reward = float(index % 2)
        return Trajectory(
            TicketId(0, group, index), 0, "train", "actor-0", "t", "e", (row,), reward, {"success": reward}, 1, "done"
        )

    played = [trajectory(g, i) for g in range(groups) for i in range(size)]
    numbers = tuple(range(groups))
    reply = BatchReply(
        "ready",
        "",
        played,
        (1.0,) * len(played),
        tuple(t.digest() for t in played),
        numbers,
        (),
        0,
        0,
        None,
        False,
        False,
    )
    batch = flatten(played, numbers)
    n = len(batch.token_ids)
    values = {name: torch.randn(n) for name in ("advantages", "returns", "proximal", "anchor", "current", "entropy",
                                                "weights", "reference_kl")}  # fmt: skip
    record = Record(values=None, clipped=torch.zeros(n, dtype=torch.bool), keep=batch.mask.clone(), **values)
    result = StepResult("applied", "", record, 0.0)
    samples = Samples(folder / "rollouts", TrackingConfig(), lambda: token_text(tokenizer))
    samples.take(0, reply, batch, result)  # the thread starts, and reads the tokenizer
    taken, written = [], []
    for b in range(1, repeats + 1):
        while samples._queue.qsize():
            time.sleep(0.001)
        cpu, begun = time.process_time(), time.thread_time()
        samples.take(b, reply, batch, result)
        taken.append(time.thread_time() - begun)
        path = folder / "rollouts" / f"0000-{b:08d}.jsonl"
        while not path.exists():
            time.sleep(0.001)
        written.append(time.process_time() - cpu)
    samples.close()
    return {
        "batch_tokens": n,
        "sampled_tokens": 2 * size * tokens,
        "cpu_of_take_s": _spread(taken),
        "cpu_of_take_and_thread_s": _spread(written),
        "file_bytes": path.stat().st_size,
        "skipped": samples.skipped,
    }


def buffer(folder: Path, tokens: int, seconds: float, repeats: int) -> dict[str, Any]:
    sections = {"learner": {"groups_per_step": 8, "group_size": 8, "ranks": 1, "backend": "torch", "steps": 100_000},
                "buffer": {"capacity": 256, "max_staleness": 1, "keep": "all"}, "eval": {"tasks": 0},
                "env": {"max_tokens": tokens}}  # fmt: skip
    process = BufferProcess(folder / "live", **sections)
    source.living = lambda run: {1: "buffer"}  # type: ignore[assignment]
    process.start()
    try:
        client, incarnation = process.learner()
        state = {"b": 0}

        def play(until: float) -> int:
            count = 0
            while time.perf_counter() < until:
                tickets = client.tickets("bench", (0, state["b"]), 64, [], 1.0).tickets
                for ticket in tickets:
                    client.put(_episode(ticket.id, ticket.attempt, str(ticket.task["id"]), tokens, state["b"]))
                    count += 1
                reply = client.batch(incarnation, state["b"], 0, 1, 0.0)
                if reply.state == "ready":
                    version = client.finished(incarnation, state["b"], "applied")
                    client.published(incarnation, 0, version, f"digest-{version}")
                    state["b"] += 1
            return count

        assert process.process is not None
        service = psutil.Process(process.process.pid)
        rates: dict[str, list[float]] = {"alone": [], "viewed": []}
        cost: dict[str, list[float]] = {"alone": [], "viewed": []}
        for _ in range(repeats):
            for name in rates:
                over = threading.Event()
                viewer = threading.Thread(target=_view, args=(process.run, over))
                if name == "viewed":
                    viewer.start()
                begun, before = time.perf_counter(), _cpu_s(service)
                count = play(begun + seconds)
                rates[name].append(count / (time.perf_counter() - begun))
                cost[name].append(1000 * (_cpu_s(service) - before) / count)
                over.set()
                if name == "viewed":
                    viewer.join()
        share = [viewed / alone for alone, viewed in zip(rates["alone"], rates["viewed"], strict=True)]
        return {
            "puts_per_s": {name: _spread(values) for name, values in rates.items()},
            "cpu_ms_of_the_buffer_per_trajectory": {name: _spread(values) for name, values in cost.items()},
            "viewed_over_alone": _spread(share),
            "load": os.getloadavg()[0],
        }
    finally:
        process.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _episode(id: TicketId, attempt: int, task: str, tokens: int, version: int) -> Trajectory:
    mask = np.arange(tokens) >= tokens // 4
    row = Row(
        np.arange(tokens, dtype=np.int32),
        mask,
        np.where(mask, -0.5, 0).astype(np.float32),
        np.where(mask, version, CONTEXT).astype(np.int32),
    )
    reward = float(id.index % 2)
    return replace(Trajectory(id, attempt, "train", "bench", task, "e", (row,), reward, {"success": reward}, 1, "done"))


def _view(run: RunFolder, over: threading.Event) -> None:
    """As the page does: a refresh every 2 s, a few trajectories per second."""
    viewed = ViewedRun(run, text=TEXT)
    read: set[tuple[int, int]] = set()
    next_refresh = 0.0
    while not over.wait(0.2):
        if time.monotonic() >= next_refresh:
            viewed.refresh()
            next_refresh = time.monotonic() + 2.0
        for key in [key for key in reversed(viewed.keys()) if key not in read][:1]:
            read.add(key)
            viewed.find(*key)
    viewed.close()


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("open", "learner", "buffer"))
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "open": lambda folder: open_(folder, given.trajectories, given.repeats),
        "learner": lambda folder: learner(folder, 16, 8, 1024, given.repeats),
        "buffer": lambda folder: buffer(folder, 1024, 6.0, given.repeats),
    }
    results: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for name, part in parts.items():
        if given.only in (None, name) and (name != "open" or found() is not None):
            with tempfile.TemporaryDirectory(prefix="asyncrl-view-") as folder:
                results[name] = part(Path(folder))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
