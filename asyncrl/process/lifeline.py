"""A role ends with its launcher, however the launcher ends.

The launcher holds the writing end of a pipe and never writes. Its death, by any cause, closes that end, and the kernel
itself then kills the role's whole process group: the reading end is armed with O_ASYNC, SIGKILL as its signal and the
group as its owner. That works while the role is stuck in C code, is stopped, or is already gone and left children.
A thread that waits for the same end of file stands in where the kernel has no F_SETSIG.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading

ENVIRONMENT = "ASYNCRL_LIFELINE"
"""Names the inherited file descriptor."""


def hold_on() -> None:
    """To be called first by every role. Does nothing in a process that no launcher started.

    The caller must lead its process group, as the launcher arranges: the group is what dies.
    """
    inherited = os.environ.get(ENVIRONMENT)
    if inherited is None:
        return
    lifeline = int(inherited)
    os.set_inheritable(lifeline, False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_die_at_the_end, args=(lifeline,), name="lifeline", daemon=True).start()


def _die_at_the_end(lifeline: int) -> None:
    # Also the case in which the launcher was gone before the pipe was armed.
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    poll.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)
