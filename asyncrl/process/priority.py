"""The priority of work that may wait: a training run goes first."""

from __future__ import annotations

import os
import threading

BACKGROUND = 10
"""The nice value of such work."""


def lower_this_process() -> None:
    os.nice(BACKGROUND)


def lower_this_thread() -> None:
    """On Linux a thread has a nice value of its own. Raises OSError where the system has none for it."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND)
