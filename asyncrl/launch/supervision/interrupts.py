"""Counts requests, by the user or the system, to end the run."""

from __future__ import annotations

import atexit
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    count = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts Ctrl-C, SIGTERM and, without nohup, SIGHUP, in place of their usual effect."""

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            self.count += 1

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        atexit.register(_ignored)
        before = {number: signal.signal(number, interrupt) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _ignored() -> None:
    """Ignores later signals, so that the process exits with the outcome's code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
