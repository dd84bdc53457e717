"""A package in a process of its own, under any Python that has it: what it pins cannot clash with ours.

    actor ──stdin──> python -P SCRIPT ARGUMENTS ──stdout──> actor          stderr: the actor's log
           requests           (needs nothing             answers,
           {"n": ...}          of asyncrl)               {"n": ..., "result": ...} or {"n": ..., "error": text}

One JSON per line. The script first says {"ready": true}, or {"error": text} if it is of no use; it ends with its stdin.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

START_S = 120.0
"""Such packages take tens of seconds to import on a busy machine."""


class WorkerProcess:
    """The process, and the requests that wait for it. One that ends, or is stuck, fails those that wait."""

    def __init__(self, name: str, command: Sequence[str], answer_s: float | None) -> None:
        """`answer_s`: a request that is not answered within it ends the process; None: it may take its time."""
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
        """The result. Raises RuntimeError with the error that the script answers, ConnectionError when it cannot."""
        process = await self._started()
        assert process.stdin is not None
        n, loop = next(self._numbers), asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        # Not the caller's timeout: a caller that gives up leaves a process behind that is as stuck as before.
        stuck = loop.call_later(self._answer_s, self._give_up, process) if self._answer_s is not None else None
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
            self._why = f"its process does not keep to the protocol: {error}"
        finally:
            self._ready.clear()  # who asks from here on is told that it is over, and why
            if process.returncode is None:
                process.kill()
            for future, stuck in self._waiting.values():
                if stuck is not None:
                    stuck.cancel()
                if not future.done():
                    future.set_exception(ConnectionError(f"{self._name}: {self._why or 'the actor stops'}"))
            await process.wait()

    def _take(self, answer: dict[str, Any]) -> None:
        if "n" not in answer:
            self._why = answer.get("error", "")
            if "ready" in answer:
                self._ready.set()
            return
        future, stuck = self._waiting.pop(answer["n"])
        if stuck is not None:
            stuck.cancel()
        if future.done():
            return  # of an episode that was given up
        if "error" in answer:
            future.set_exception(RuntimeError(f"{self._name}: {answer['error']}"))
        else:
            future.set_result(answer["result"])

    def _give_up(self, process: asyncio.subprocess.Process) -> None:
        self._why = f"its process did not answer within {self._answer_s} s and was killed"
        if process.returncode is None:
            process.kill()


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, ...], WorkerProcess]] = WeakKeyDictionary()


def shared(name: str, command: Sequence[str], *, answer_s: float | None = None) -> WorkerProcess:
    """The one process of this event loop with this command; ends with the loop. One that ended is started again."""
    workers, key = _shared.setdefault(asyncio.get_running_loop(), {}), tuple(command)
    if key not in workers or not workers[key].usable:
        workers[key] = WorkerProcess(name, command, answer_s)
    return workers[key]
