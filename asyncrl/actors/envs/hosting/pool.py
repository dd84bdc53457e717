"""`env.workers`: environments off the actor's event loop, in threads or in processes that are started once.

    episode ──reset, step, close──> HostedEnv ──> Worker ══socket══> worker.py: the environment
                                                    │ gone, or stands still: its episodes fail, another takes its place

Each worker is an event loop for many environments at once; an environment stays in the worker it began in. A call has
the deadline of any other (`env.call_s`), and the time that it waits behind a call that blocks counts.
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
from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)

START_S = 120.0
"""In which a worker must have started; the user's imports included, on a machine that is busy with other things."""
AGAIN_S = 1.0
"""Before a worker that was lost is started again."""
LOOK_S = 1.0
"""Between two looks whether a worker that was told to give up a call has heard it."""


class Workers:
    """`async with` starts them, and ends them."""

    def __init__(
        self, kind: Literal["threads", "processes"], count: int, name: str, options: Mapping[str, Any], call_s: float
    ) -> None:
        """`name`, `options`: of the environment, as in the config. `call_s`: a worker that says nothing for so long
        while a call was given up stands still, and is replaced."""
        self._workers = [Worker(kind, [name, dict(options), sys.path], call_s) for _ in range(count)]
        self._kind = kind

    async def __aenter__(self) -> Workers:
        """Raises ConfigError when one does not come up: the environment's module cannot be loaded there."""
        started = await asyncio.gather(*(worker.started() for worker in self._workers))
        if not all(started):
            await self.__aexit__()
            raise ConfigError(
                f"env.workers is {self._kind}: {started.count(False)} of {len(started)} workers ended at their start, "
                f"or took longer than {START_S:.0f} s: see above for why."
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def env(self) -> HostedEnv:
        """One for one episode, where the fewest are."""
        return HostedEnv(min(self._workers, key=lambda worker: (not worker.ready.is_set(), len(worker.envs))))


class HostedEnv(Environment):
    """An environment that lives in a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._number = worker, worker.take_in()

    async def reset(self, task: Task) -> list[Message]:
        found = await self._worker.call(self._number, "reset", dict(task))
        self.tools = [Tool(name, schema, _not_here) for name, schema in found["tools"]]
        messages: list[Message] = found["messages"]
        return messages

    async def step(self, message: Message) -> Turn:
        return Turn(**await self._worker.call(self._number, "step", dict(message)))

    async def close(self) -> None:
        await self._worker.let_go(self._number)


def _not_here(**_: Any) -> None:
    raise TypeError("a tool of an environment in a worker is called there")


class Worker:
    """The thread or process, and the calls that wait for it."""

    def __init__(self, kind: Literal["threads", "processes"], recipe: list[Any], call_s: float) -> None:
        self.ready = asyncio.Event()
        self.envs: set[int] = set()
        """That live here now. A number that is not among them is of a worker that was replaced."""
        self._start = _thread if kind == "threads" else _process
        self._recipe, self._call_s = recipe, call_s
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._given_up: set[int] = set()
        """Calls that the worker was told to give up, and has not answered."""
        self._heard = 0.0
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.create_task(self._run(), name="env-worker")

    async def started(self) -> bool:
        """Whether it came up, the first time."""
        waiting = asyncio.ensure_future(self.ready.wait())
        await asyncio.wait([waiting, self._task], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return self.ready.is_set()

    def take_in(self) -> int:
        number = next(self._numbers)
        self.envs.add(number)
        return number

    async def let_go(self, number: int) -> None:
        if number in self.envs:
            self.envs.remove(number)
            if self.ready.is_set():
                await self._ask({"env": number, "op": "close", "arg": None})

    async def call(self, number: int, op: str, arg: Any) -> Any:
        """Raises EnvFailed: what the environment raised, or that its worker is gone."""
        await self.ready.wait()
        if number not in self.envs:
            raise EnvFailed("its worker was lost since the episode began")
        return await self._ask({"env": number, "op": op, "arg": arg})

    def close(self) -> None:
        """The process is gone, or about to; a thread ends once nothing in it blocks."""
        self._task.cancel()

    async def _ask(self, wish: dict[str, Any]) -> Any:
        n = next(self._numbers)
        future = self._pending[n] = asyncio.get_running_loop().create_future()
        try:
            self._send({"n": n, **wish})
            return await future
        except asyncio.CancelledError:
            if self._writer is None:
                raise  # it is gone: who comes after it has not heard of this call
            self._given_up.add(n)
            self._send({"n": n, "op": "cancel"})
            if len(self._given_up) == 1:
                asyncio.get_running_loop().call_later(LOOK_S, self._look)
            raise
        finally:
            del self._pending[n]

    def _send(self, wish: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(message(wish))

    def _look(self) -> None:
        """Whether it stands still: given up is what it does not even notice."""
        if not self._given_up or self._writer is None:
            return
        patience_s = max(self._call_s, LOOK_S) if self.ready.is_set() else START_S
        if time.monotonic() - self._heard >= patience_s:
            log.error("a worker of env.workers stood still for %.0f s: it is replaced", patience_s)
            self._writer.transport.abort()
        else:
            asyncio.get_running_loop().call_later(LOOK_S, self._look)

    async def _run(self) -> None:
        """Starts it, reads what it says until it is gone, and does so again, unless it never came up."""
        came_up = True
        while came_up:
            ours, theirs = socket.socketpair()
            end = self._start(theirs)
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._heard = time.monotonic()
            try:
                self._send(self._recipe)
                while True:
                    self._hear(await read(reader))
            except (asyncio.IncompleteReadError, OSError):
                log.error(
                    "a worker of env.workers ended with %d environments in it; another is started", len(self.envs)
                )
            finally:
                came_up = self.ready.is_set()
                self.ready.clear()
                self._writer.close()
                self._writer = None
                self.envs.clear()
                self._given_up.clear()
                end()
                for future in self._pending.values():
                    if not future.done():
                        future.set_exception(EnvFailed("its worker ended, or stood still and was ended"))
            await asyncio.sleep(AGAIN_S if came_up else 0)

    def _hear(self, said: Mapping[str, Any]) -> None:
        self._heard = time.monotonic()
        if "ready" in said:
            self.ready.set()
            return
        if "begun" in said:
            return
        self._given_up.discard(said["n"])
        future = self._pending.get(said["n"])
        if future is None or future.done():
            return  # of a call that was given up
        if "error" in said:
            future.set_exception(EnvFailed(said["error"]))
        else:
            future.set_result(said["value"])


def _thread(theirs: socket.socket) -> Callable[[], None]:
    """What blocks in it cannot be ended: it is left behind, and keeps no process alive."""
    threading.Thread(target=lambda: asyncio.run(serve(theirs)), name="env-worker", daemon=True).start()
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
