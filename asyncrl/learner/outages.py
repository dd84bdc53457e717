"""The buffer may be gone for a while: it is restarted within `launch.restart_window_s`, or the run is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from asyncrl.buffer.client import BufferTimeout

log = logging.getLogger(__name__)
T = TypeVar("T")


def through_outages(call: Callable[[], T], patience_s: float, again: Callable[[], bool] = lambda: True) -> T:
    """What `call` returns, asked again while the buffer does not answer and `again` agrees. Raises BufferTimeout."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except BufferTimeout as error:
            if time.monotonic() > deadline or not again():
                raise
            log.warning("%s Asking again.", error)
