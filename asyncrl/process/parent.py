"""Ends a helper process with the process that started it, even while it computes or hangs."""

from __future__ import annotations

import os
import signal
import threading
import time


def end_with_parent() -> None:
    """Starts a thread that kills this process's group once the parent is gone. The caller must lead its group, and call
    this first."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgrp(), signal.SIGKILL)
