"""Runs a score in processes of its own: one that hangs or crashes is killed, and only that episode fails."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import queue
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from asyncrl.rewards.score import Score, asks, name_of

_START_S = 120.0
"""Seconds to start a worker, with the import of the user's file and of `imports`, on a busy machine."""


class InProcesses:
    """Runs a plain function (with its options) in `processes` worker processes; past `timeout_s` a worker is killed.

    The function is found again in the worker by where it was defined, so it must stand at the top level of a file.
    """

    takes_all = True

    def __init__(
        self, score: Score, *, timeout_s: float = 10.0, processes: int = 2, imports: Sequence[str] = ()
    ) -> None:
        """
        Args:
            timeout_s: for one call, once a worker is free and ready; keep `env.call_s` above it.
            processes: calls at the same time, per actor.
            imports: modules that a worker imports before its first call, outside of `timeout_s`.
        Raises ValueError for a score that cannot be found again by name.
        """
        self._name, self._timeout_s, self._count = name_of(score), timeout_s, processes
        self._score = score
        path, options = _recipe(score)
        recipe: bytes = msgpack.packb((sys.path, path, options, list(imports)))
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(processes):
            self._idle.put(_Worker(recipe))
        self._slots: tuple[asyncio.AbstractEventLoop | None, asyncio.Semaphore] = (None, asyncio.Semaphore(processes))

    async def __call__(self, **columns: Any) -> Any:
        loop = asyncio.get_running_loop()
        if self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._count))
        columns = {name: value for name, value in columns.items() if asks(self._score, name)}
        async with self._slots[1]:
            return await asyncio.to_thread(self._run, columns)

    def _run(self, columns: dict[str, Any]) -> Any:
        worker = self._idle.get(timeout=_START_S + self._timeout_s)
        try:
            kind, result = worker.ask(msgpack.packb(columns), self._timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"score {self._name} did not return within {self._timeout_s} s (in_processes.timeout_s): its process "
                "was killed"
            ) from None
        except _StartFailed as error:
            raise RuntimeError(f"score {self._name}: {error}") from None
        except (EOFError, OSError) as error:
            raise RuntimeError(f"score {self._name}: its process died ({type(error).__name__})") from error
        finally:
            self._idle.put(worker)
        if kind == "error":
            raise RuntimeError(f"score {self._name}: {result}")
        return result


class _StartFailed(Exception):
    """A worker cannot load the score, or does not do so within `_START_S`. No TimeoutError: no call was late."""


class _Worker:
    """One process, started on first use, and again after it was killed."""

    def __init__(self, recipe: bytes) -> None:
        """`recipe`: what the process loads before it is ready."""
        self._recipe = recipe
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def ask(self, message: bytes, timeout_s: float) -> Any:
        """Raises TimeoutError, or EOFError or OSError if it dies, or _StartFailed; the process has ended then."""
        try:
            connection = self._connection or self._start()
            connection.send_bytes(message)
            return msgpack.unpackb(_receive(connection, timeout_s))
        except (EOFError, OSError, _StartFailed):
            self.kill()
            raise

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.rewards.isolation.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        _living.add(self)
        self._connection.send_bytes(self._recipe)
        try:
            kind, text = msgpack.unpackb(_receive(self._connection, _START_S))
        except TimeoutError:
            raise _StartFailed(f"its process was not ready within {_START_S:g} s and was killed") from None
        if kind == "error":
            raise _StartFailed(text)
        return self._connection

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


_living: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for worker in list(_living):
        worker.kill()


def _receive(connection: Connection, timeout_s: float) -> bytes:
    if not connection.poll(timeout_s):
        raise TimeoutError
    return connection.recv_bytes()


def _recipe(score: Score) -> tuple[str, dict[str, Any]]:
    """(import path, options) under which a worker finds the function."""
    if isinstance(score, functools.partial):
        if score.args:
            raise ValueError(f"in_processes: {name_of(score)} has positional options; give them by name.")
        return _recipe(score.func)[0], dict(score.keywords)
    module, name = getattr(score, "__module__", None), getattr(score, "__qualname__", None)
    if module is None or name is None or "<" in name:
        raise ValueError(
            f"in_processes wraps a function at the top level of a file, and {name_of(score)} is none: a worker could "
            "not find it. Scores that are objects (judge, reward_model, code_tests, math) have processes of their own."
        )
    file = getattr(sys.modules[module], "__file__", None)
    if module == "__main__" or module.startswith("asyncrl_plugin_"):
        return f"{file}:{name}", {}
    return f"{module}:{name}", {}
