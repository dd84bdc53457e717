"""Threads for what may never return: users' plain functions, requests to a teacher's servers. None blocks the exit."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

THREAD_NAME = "plain-function"


class DaemonThreads(ThreadPoolExecutor):
    """One thread per call; the caller bounds their number. The standard library's pool joins its threads before
    Python exits, and would wait for a stuck one for ever."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        call = functools.partial(_call, future, functools.partial(fn, *args, **kwargs))
        threading.Thread(target=call, name=THREAD_NAME, daemon=True).start()
        return future

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
