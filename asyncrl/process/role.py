"""The beginning and end of every process of a run: bound to its launcher, logging, with a defined exit code."""

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
    """Runs `main` as the process of `role`. An AsyncRLError ends it with CONFIG_ERROR or RUN_ERROR; any other exception
    with a traceback and exit code 1, after which it is restarted."""
    lifeline.bind_to_launcher()
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
    """Raises the limit of open files and sockets to `count`, or as far as the system permits. The usual limit, 1024, is
    below what an actor's agents, tool servers and clients, or a buffer's peers, may need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def settle() -> None:
    """Excludes all present objects from garbage collection; called once everything is loaded. With torch and
    transformers loaded, each full collection would otherwise take a tenth of a second."""
    gc.collect()
    gc.freeze()
