"""How every process of a run begins and ends: bound to its launcher, logging, its exit code meaning something."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from typing import NoReturn

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.process import lifeline, logs
from asyncrl.process.logs import CONFIG_ERROR, RUN_ERROR


def play(role: str, main: Callable[[], None]) -> NoReturn:
    """Runs `main` as the process of `role`. Any other exception is a death: traceback, exit code 1, restarted."""
    lifeline.hold_on()
    allow_open_files()
    log = logs.setup(role)
    try:
        main()
    except AsyncRLError as error:
        log.debug("raised here", exc_info=True)
        log.error("%s", error)
        sys.exit(CONFIG_ERROR if isinstance(error, ConfigError) else RUN_ERROR)
    sys.exit(0)


def allow_open_files(count: int = 65536) -> None:
    """As many of `count` files, sockets included, as the system lets this process have open. What it usually starts
    with, 1024, is fewer than an actor's agents, tool servers and clients can come to, or a buffer's peers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def settle() -> None:
    """Called when everything is loaded. What is there now stays: the collector need not look at it again, which with
    torch and transformers loaded costs a tenth of a second each time."""
    gc.collect()
    gc.freeze()
