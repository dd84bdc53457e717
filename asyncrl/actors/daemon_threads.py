"""Threads for what users write as plain functions: tools, scores, agents. One that never returns holds nobody up."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

CALLS = "plain-function"
"""The name of these threads."""


class DaemonThreads(ThreadPoolExecutor):
    """A thread per call, as many as are asked for: episodes bound them. The pool of the standard library has its
    threads joined before Python ends, and would wait for a stuck one for ever."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        call = functools.partial(_call, future, functools.partial(fn, *args, **kwargs))
        threading.Thread(target=call, name=CALLS, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Returns at once."""


def use_daemon_threads() -> None:
    """For `asyncio.to_thread` in the running loop."""
    asyncio.get_running_loop().set_default_executor(DaemonThreads())


def running() -> int:
    """Calls that have not returned."""
    return sum(thread.name == CALLS for thread in threading.enumerate())


def _call(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except SystemExit as error:  # in the awaiting coroutine it would end the event loop, and all episodes in it
        future.set_exception(RuntimeError(f"it called sys.exit({error.code!r})"))
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
