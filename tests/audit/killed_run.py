"""A small run of the real buffer process, ended by SIGKILL three times; learner and actor are threads of the test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.buffer.client import BufferClient
from asyncrl.run_folder import RunFolder
from tests.audit.real_run import fake_actor
from tests.buffer.processes import BufferProcess


def train(client: BufferClient, incarnation: int, over: threading.Event, told: list[int] | None = None) -> None:
    """`told`: gets the versions as they are published."""
    b = 0
    while not over.is_set():
        reply = client.batch(incarnation, b, 0, 1, wait_s=0.2)
        if reply.state == "ready":
            version = client.finished(incarnation, b, "applied")
            client.published(incarnation, 0, version, f"digest-{version}")
            if told is not None:
                told.append(version)
            b += 1


def make_killed_run(folder: Path) -> RunFolder:
    """Leaves the run folder of a buffer that was killed while puts, batches and publications were on their way."""
    process = BufferProcess(folder / "run", learner={"steps": 8}, eval={"tasks": 0})
    process.start()
    over = threading.Event()
    client, incarnation = process.learner()
    told = [0]
    learner = threading.Thread(target=train, args=(client, incarnation, over, told))
    try:
        with fake_actor(process.run, "actor-0"):
            learner.start()
            for batches in (2, 4, 6):
                until(lambda batches=batches: process.client().status()["batches"] >= batches)
                process.kill()
                process.start()
            until(lambda: process.client().status()["batches"] >= 8)
            over.set()
            learner.join(30)
        process.kill()
    finally:
        over.set()
        process.close()
    assert not learner.is_alive()
    # As the launcher writes what a learner reports.
    about = {"kind": "published", "role": "learner", "branch": 0}
    events = (json.dumps({**about, "step": version, "digest": f"digest-{version}"}) for version in told)
    (process.run.path / "events.jsonl").write_text("".join(f"{event}\n" for event in events))
    return process.run


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
