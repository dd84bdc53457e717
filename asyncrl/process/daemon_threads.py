"""Threads for what may never return: users' plain functions, requests to a teacher's servers. None blocks the exit."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

THREAD_NAME, FREE_NAME = "plain-function", "free"
"""Of a thread with a call, and of one without."""


class DaemonThreads(ThreadPoolExecutor):
    """As many threads as calls run at once; the caller bounds their number. The standard library's pool joins its
    threads before Python exits, and would wait for a stuck one for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Threads that have returned from a call and have no other one yet. A start is not cheap: the caller waits until
        # the new thread runs, which it does when no other thread, such as an engine's, holds the interpreter's lock.
        self._free = threading.Semaphore(0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put(functools.partial(_call, future, functools.partial(fn, *args, **kwargs)))
        if not self._free.acquire(blocking=False):
            threading.Thread(target=self._run_calls, name=THREAD_NAME, daemon=True).start()
        return future

    def _run_calls(self) -> None:
        thread = threading.current_thread()
        while True:
            call = self._calls.get()
            thread.name = THREAD_NAME
            call()
            del call  # or its result would live until the next one
            thread.name = FREE_NAME
            self._free.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Returns at once."""


def use_daemon_threads() -> None:
    """Make `asyncio.to_thread` in the running loop use daemon threads."""
    asyncio.get_running_loop().set_default_executor(DaemonThreads())


def running() -> int:
    """Number of calls that have not returned."""
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def _call(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except SystemExit as error:  # in the awaiting coroutine it would end the event loop and all its episodes
        future.set_exception(RuntimeError(f"it called sys.exit({error.code!r})"))
    except StopIteration:  # no future takes it, and the caller would wait for ever
        future.set_exception(RuntimeError("it raised StopIteration"))
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(RuntimeError(f"it raised {type(error).__name__}"))
    else:
        future.set_result(result)
