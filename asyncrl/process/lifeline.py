"""Ends a process with the one that started it, however that one ends.

The starting process holds the writing end of a pipe and never writes. Its death, by any cause, closes that end.

For a role the kernel itself then kills the whole process group: the reading end is armed with O_ASYNC, SIGKILL as its
signal and the group as its owner. That works while the role is stuck in C code, is stopped, or has ended and left
children. A thread that waits for the end of file stands in where the kernel has no F_SETSIG.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
from collections.abc import Callable

ENVIRONMENT = "ASYNCRL_LIFELINE"
"""Names the inherited file descriptor of a role, or of a bound launcher."""


def bind_to_launcher() -> None:
    """Binds this role to its launcher; every role calls it first, before its imports, and so does a launcher that
    another command started (launch/bound.py). Does nothing in a process that neither started, or that is bound.

    The caller must lead its process group, as the launcher arranges: the group is what dies.
    """
    inherited = os.environ.pop(ENVIRONMENT, None)  # what this role starts does not have the file
    if inherited is None:
        return
    lifeline = int(inherited)
    arm(lifeline)
    at_end(lifeline, lambda: os.killpg(os.getpgrp(), signal.SIGKILL))


def arm(lifeline: int) -> None:
    """Lets the kernel, where it has F_SETSIG, kill this process's group once the writing end is closed; at once, if it
    is closed already."""
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([lifeline], [], [], 0)[0]:
            os.killpg(os.getpgrp(), signal.SIGKILL)


def at_end(lifeline: int, act: Callable[[], None]) -> None:
    """Calls `act` in a thread once the writing end of the inherited `lifeline` is closed."""
    os.set_inheritable(lifeline, False)

    def wait() -> None:
        poll = select.poll()
        poll.register(lifeline, select.POLLIN | select.POLLHUP)
        poll.poll()
        act()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
