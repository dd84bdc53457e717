"""A package in a separate process, under any Python that has it, so that its pinned versions cannot clash with ours.

    actor ──stdin──> python -P SCRIPT ARGUMENTS ──stdout──> actor          stderr: the actor's log
           requests           (needs nothing             answers,
           {"n": ...}          of asyncrl)               {"n": ..., "result": ...} or {"n": ..., "error": text}

One JSON object per line. The script first writes {"ready": true}, or {"error": text} if it cannot work; it
exits when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

START_S = 120.0
"""Deadline, in seconds, for the start: such packages take tens of seconds to import on a busy machine."""


class ForeignProcess:
    """The process and its pending requests, which fail when it ends or is stuck."""

    def __init__(self, name: str, command: Sequence[str], answer_s: float | None) -> None:
        """`answer_s`: a request that takes longer ends the process; None: no deadline."""
        self._name, self._command, self._answer_s = name, command, answer_s
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[Any], asyncio.TimerHandle | None]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self._why = ""
        self._task = asyncio.create_task(self._run(), name=name)

    @property
    def usable(self) -> bool:
        return not self._task.done()

    async def ask(self, **request: Any) -> Any:
        """The result of a request. Raises RuntimeError with the script's error, ConnectionError if the process ends."""
        process = await self._started()
        assert process.stdin is not None
        n, loop = next(self._numbers), asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        # Independent of the caller's timeout: when the caller gives up, the process is still stuck.
        stuck = loop.call_later(self._answer_s, self._kill_stuck, process) if self._answer_s is not None else None
        self._waiting[n] = future, stuck
        process.stdin.write(json.dumps({"n": n, **request}).encode() + b"\n")
        return await future

    async def _started(self) -> asyncio.subprocess.Process:
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait([ready, self._task], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._task.done() or self._process is None or not self._ready.is_set():
            self._task.cancel()
            raise ConnectionError(f"{self._name}: {self._why or f'its process did not start within {START_S:.0f} s'}")
        return self._process

    async def _run(self) -> None:
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
            )
        except OSError as error:
            self._why = str(error)
            return
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._take(json.loads(line))
            code = await process.wait()
            self._why = self._why or f"its process ended with {code}; the log says why"
        except ValueError as error:
            self._why = f"its process violates the protocol: {error}"
        finally:
            self._ready.clear()  # later requests fail with the reason
            if process.returncode is None:
                process.kill()
            for future, stuck in self._waiting.values():
                if stuck is not None:
                    stuck.cancel()
                if not future.done():
                    future.set_exception(ConnectionError(f"{self._name}: {self._why or 'the actor stops'}"))
            await process.wait()

    def _take(self, reply: dict[str, Any]) -> None:
        if "n" not in reply:
            self._why = reply.get("error", "")
            if "ready" in reply:
                self._ready.set()
            return
        future, stuck = self._waiting.pop(reply["n"])
        if stuck is not None:
            stuck.cancel()
        if future.done():
            return  # the episode was given up
        if "error" in reply:
            future.set_exception(RuntimeError(f"{self._name}: {reply['error']}"))
        else:
            future.set_result(reply["result"])

    def _kill_stuck(self, process: asyncio.subprocess.Process) -> None:
        self._why = f"its process did not answer within {self._answer_s} s and was killed"
        if process.returncode is None:
            process.kill()


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, ...], ForeignProcess]] = WeakKeyDictionary()


def shared(name: str, command: Sequence[str], *, answer_s: float | None = None) -> ForeignProcess:
    """Return the process for this command. Callers on one event loop share it, and it ends with the loop. If it has
    ended, a new one is started."""
    workers, key = _shared.setdefault(asyncio.get_running_loop(), {}), tuple(command)
    if key not in workers or not workers[key].usable:
        workers[key] = ForeignProcess(name, command, answer_s)
    return workers[key]
