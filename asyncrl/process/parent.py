"""A helper process ends with the process that started it, also while it computes or hangs."""

from __future__ import annotations

import os
import signal
import threading
import time


def end_with_parent() -> None:
    """A thread kills this process's group once its parent is gone. To be called first, by a process that leads its
    group."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgrp(), signal.SIGKILL)
