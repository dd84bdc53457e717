"""`env.workers`: environments off the actor's event loop, in threads or processes that are started once.

    episode ──reset, step, close──> HostedEnv ──> Worker ══socket══> worker.py: the environment
                                                    │ gone, or blocked: its episodes fail, and another replaces it

Each worker is an event loop for many environments; an environment stays in its worker. A call has the usual deadline
(`env.call_s`), which includes the time that it waits behind a blocking call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from asyncrl.actors.envs.hosting.worker import message, read, serve
from asyncrl.actors.envs.protocol import EnvFailed, Environment, Message, Task, Tool, Turn
from asyncrl.actors.envs.resuming import Way
from asyncrl.errors import ConfigError
from asyncrl.trajectory.turns import Snapshot
from asyncrl.user_errors import Cause

log = logging.getLogger(__name__)

START_S = 120.0
"""Deadline, in seconds, for a worker to start, including the user's imports on a busy machine."""
RESTART_S = 1.0
"""Seconds before a lost worker is restarted."""
MAX_RESTART_S = 30.0
"""Seconds before another attempt, at most, where the restarts of a worker fail."""
LOOK_S = 1.0
"""Seconds between two checks that a worker has cancelled a call."""


class EnvWorkers:
    """The workers of one actor; `async with` starts and ends them."""

    def __init__(
        self, kind: Literal["threads", "processes"], count: int, name: str, options: Mapping[str, Any], call_s: float
    ) -> None:
        """`name`, `options`: the environment, as in the config. `call_s`: a worker that is silent for this long after
        it was told to cancel a call counts as blocked, and is replaced."""
        self._workers = [EnvWorker(kind, [name, dict(options), sys.path], call_s) for _ in range(count)]
        self._kind = kind

    async def __aenter__(self) -> EnvWorkers:
        """Raises ConfigError when a worker does not start: it cannot load the environment's module."""
        started = await asyncio.gather(*(worker.started() for worker in self._workers))
        if not all(started):
            await self.__aexit__()
            raise ConfigError(
                f"env.workers is {self._kind}: {started.count(False)} of {len(started)} workers ended at their start, "
                f"or took longer than {START_S:.0f} s: the log above says why."
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def env(self) -> HostedEnv:
        """A new environment, in the worker with the fewest."""
        return HostedEnv(min(self._workers, key=lambda worker: (not worker.ready.is_set(), len(worker.envs))))


class HostedEnv(Environment):
    """An environment that lives in a worker."""

    def __init__(self, worker: EnvWorker) -> None:
        self._worker, self._number = worker, worker.add_env()
        self._resumed_by: Way = "none"
        self._half = ""

    @property
    def resumed_by(self) -> Way:
        """How the environment in the worker is resumed; known once `reset` has returned. Raises EnvFailed where it
        declares no way that holds."""
        if self._half:
            raise EnvFailed(self._half)
        return self._resumed_by

    async def reset(self, task: Task, interrupted: Message | None = None) -> list[Message]:
        told = None if interrupted is None else dict(interrupted)
        reply = await self._worker.call(self._number, "reset", [dict(task), told])
        self._resumed_by, self._half = reply["resumed_by"], reply.get("half", "")
        self.tools = [Tool(name, schema, _not_here) for name, schema in reply["tools"]]
        self.reset_state = reply["reset_state"]
        messages: list[Message] = reply["messages"]
        return messages

    async def step(self, message: Message) -> Turn:
        return Turn(**await self._worker.call(self._number, "step", dict(message)))

    async def snapshot(self) -> Snapshot | None:
        state: Snapshot | None = await self._worker.call(self._number, "snapshot", None)
        return state

    async def restore(self, state: Snapshot) -> None:
        await self._worker.call(self._number, "restore", state)

    async def close(self) -> None:
        await self._worker.close_env(self._number)


def _not_here(**_: Any) -> None:
    raise TypeError("tools of an environment in a worker are called by the worker")


class EnvWorker:
    """A thread or process, and the pending calls to it."""

    def __init__(self, kind: Literal["threads", "processes"], recipe: list[Any], call_s: float) -> None:
        self.ready = asyncio.Event()
        self.envs: set[int] = set()
        """Numbers of the environments in this worker. Any other number belonged to a worker that was replaced."""
        self._start = _thread if kind == "threads" else _process
        self._recipe, self._call_s = recipe, call_s
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._cancelled: set[int] = set()
        """Calls that the worker was told to cancel, and has not answered."""
        self._last_reply = 0.0
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.create_task(self._run(), name="env-worker")

    async def started(self) -> bool:
        """Whether the worker came up, the first time."""
        waiting = asyncio.ensure_future(self.ready.wait())
        await asyncio.wait([waiting, self._task], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return self.ready.is_set()

    def add_env(self) -> int:
        number = next(self._numbers)
        self.envs.add(number)
        return number

    async def close_env(self, number: int) -> None:
        if number in self.envs:
            self.envs.remove(number)
            if self.ready.is_set():
                await self._ask({"env": number, "op": "close", "arg": None})

    async def call(self, number: int, op: str, arg: Any) -> Any:
        """Raises EnvFailed with the environment's error, or when the worker is gone."""
        await self.ready.wait()
        if number not in self.envs:
            raise EnvFailed("its worker was lost since the episode began")
        return await self._ask({"env": number, "op": op, "arg": arg})

    def close(self) -> None:
        """End the worker. A process is killed; a thread ends once nothing in it blocks."""
        self._task.cancel()

    async def _ask(self, request: dict[str, Any]) -> Any:
        n = next(self._numbers)
        future = self._pending[n] = asyncio.get_running_loop().create_future()
        try:
            self._send({"n": n, **request})
            return await future
        except asyncio.CancelledError:
            if self._writer is None:
                raise  # the worker is gone, and its successor does not know this call
            self._cancelled.add(n)
            self._send({"n": n, "op": "cancel"})
            if len(self._cancelled) == 1:
                asyncio.get_running_loop().call_later(LOOK_S, self._look)
            raise
        finally:
            del self._pending[n]

    def _send(self, content: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(message(content))

    def _look(self) -> None:
        """Replace the worker if it is blocked: it does not answer a cancellation."""
        if not self._cancelled or self._writer is None:
            return
        patience_s = max(self._call_s, LOOK_S) if self.ready.is_set() else START_S
        if time.monotonic() - self._last_reply >= patience_s:
            log.error("a worker of env.workers was blocked for %.0f s: it is replaced", patience_s)
            self._writer.transport.abort()
        else:
            asyncio.get_running_loop().call_later(LOOK_S, self._look)

    async def _run(self) -> None:
        """Start the worker, read its replies until it is gone, and repeat, unless it never came up."""
        came_up, pause_s = False, RESTART_S
        while True:
            try:
                await self._serve_one()
            except (asyncio.IncompleteReadError, OSError) as error:
                why = "" if isinstance(error, asyncio.IncompleteReadError) else f" ({error})"
                if not (self.ready.is_set() or came_up):
                    log.error("a worker of env.workers ended at its start%s", why)
                    return
                # One that does not come up again is tried less and less often: its module may be in the making.
                pause_s = RESTART_S if self.ready.is_set() else min(2 * pause_s, MAX_RESTART_S)
                log.error(
                    "a worker of env.workers ended with %d environments in it%s; another is started in %.0f s",
                    len(self.envs), why, pause_s,
                )  # fmt: skip
                came_up = True
            finally:
                self._forget()
            await asyncio.sleep(pause_s)

    async def _serve_one(self) -> None:
        """Start a worker and take its replies. Raises IncompleteReadError when it ends, OSError when it cannot start,
        breaks the protocol or is not ready in time."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as end:
            try:
                end.callback(self._start(theirs))
                reader, self._writer = await asyncio.open_connection(sock=ours)
            except OSError:
                ours.close()
                raise
            end.callback(self._writer.close)
            self._last_reply = time.monotonic()
            self._send(self._recipe)
            try:
                async with asyncio.timeout(START_S) as starting:
                    while True:
                        self._take(await read(reader))
                        if self.ready.is_set():
                            starting.reschedule(None)
            except TimeoutError:
                raise OSError(f"it was not ready within {START_S:.0f} s") from None

    def _forget(self) -> None:
        """Fail the calls to the worker that is gone."""
        self.ready.clear()
        self._writer = None
        self.envs.clear()
        self._cancelled.clear()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(EnvFailed("its worker ended, or was blocked and was ended"))

    def _take(self, reply: Any) -> None:
        """Raises OSError for what no worker sends: an environment has written into its socket."""
        if not isinstance(reply, dict):
            raise OSError("no reply")
        self._last_reply = time.monotonic()
        if "ready" in reply:
            self.ready.set()
            return
        if "begun" in reply:
            return
        if reply.get("n") is None or not reply.keys() & {"value", "error"}:
            raise OSError("no reply")
        self._cancelled.discard(reply["n"])
        future = self._pending.get(reply["n"])
        if future is None or future.done():
            return  # the call was cancelled
        if "error" in reply:
            cause = Cause(*reply["cause"]) if "cause" in reply else None
            future.set_exception(EnvFailed(reply["error"], cause))
        else:
            future.set_result(reply["value"])


def _thread(theirs: socket.socket) -> Callable[[], None]:
    """Start a thread. If it blocks it cannot be ended; it is abandoned, and keeps no process alive."""
    thread = threading.Thread(target=lambda: asyncio.run(serve(theirs)), name="env-worker", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the machine has no more of them
        theirs.close()
        raise OSError(str(error)) from error
    return lambda: None


def _process(theirs: socket.socket) -> Callable[[], None]:
    command = [sys.executable, "-m", "asyncrl.actors.envs.hosting.worker", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    return end
