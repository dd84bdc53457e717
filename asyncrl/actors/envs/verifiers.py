"""Tasksets of the package verifiers, played by verifiers itself in a process of its own, through the actor's endpoint.

One worker process per actor and configuration: `asyncrl/data/verifiers_worker.py`, under any Python that has verifiers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from typing import Any
from weakref import WeakKeyDictionary

from asyncrl.data.base import Task
from asyncrl.data.verifiers import WORKER, worker_config

START_S = 120.0
"""verifiers takes tens of seconds to import on a busy machine."""


async def play_verifiers(
    task: Task, client: Any, *, taskset: dict[str, Any], python: str = "", agent: dict[str, Any] | None = None
) -> dict[str, float]:
    """A task of a taskset of verifiers, played by its harness; the rewards by name.

    Args:
        task: of `data.source: verifiers`.
        client: bound to this episode.
        taskset: verifiers' configuration of it, as in `data.options`.
        python: the interpreter that has verifiers; empty: this one.
        agent: verifiers' configuration of the agent; default: the null harness, as a process of this machine.
    Raises RuntimeError when verifiers reports an error, ConnectionError when its process ends.
    """
    rewards = await _worker(python or sys.executable, worker_config(taskset, agent)).play(
        int(task["index"]), str(client.base_url)
    )
    return {name: float(value) for name, value in rewards.items()}


class Worker:
    """The process, and the episodes that wait for it."""

    def __init__(self, python: str, config: str) -> None:
        self._python, self._config = python, config
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self._why = ""
        self._task = asyncio.create_task(self._run(), name="verifiers")

    @property
    def usable(self) -> bool:
        return not self._task.done()

    async def play(self, index: int, base_url: str) -> dict[str, float]:
        n = next(self._numbers)
        future = self._waiting[n] = asyncio.get_running_loop().create_future()
        try:
            ready = asyncio.ensure_future(self._ready.wait())
            await asyncio.wait([ready, self._task], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            if not self._ready.is_set() or self._process is None or self._process.stdin is None:
                self._task.cancel()
                raise ConnectionError(f"verifiers did not start within {START_S:.0f} s: {self._why}")
            wish = {"n": n, "index": index, "base_url": base_url.rstrip("/")}
            self._process.stdin.write(json.dumps(wish).encode() + b"\n")
            rewards: dict[str, float] = await future
            return rewards
        finally:
            del self._waiting[n]

    async def _run(self) -> None:
        try:
            # stderr is the actor's log.
            process = self._process = await asyncio.create_subprocess_exec(
                self._python, "-P", WORKER, self._config, "play",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
            )  # fmt: skip
        except OSError as error:
            self._why = str(error)
            return
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._take(json.loads(line))
            self._why = f"its process ended with {await process.wait()}"
        finally:
            if process.returncode is None:
                process.kill()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ConnectionError(f"verifiers: {self._why or 'the actor stops'}"))

    def _take(self, answer: dict[str, Any]) -> None:
        if "ready" in answer:
            self._ready.set()
            return
        future = self._waiting.get(answer["n"])
        if future is None or future.done():
            return  # of an episode that was given up
        if "error" in answer:
            future.set_exception(RuntimeError(f"verifiers: {answer['error']}"))
        else:
            future.set_result(answer["rewards"])


_workers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], Worker]] = WeakKeyDictionary()


def _worker(python: str, config: str) -> Worker:
    workers = _workers.setdefault(asyncio.get_running_loop(), {})
    if (python, config) not in workers or not workers[python, config].usable:
        workers[python, config] = Worker(python, config)
    return workers[python, config]
