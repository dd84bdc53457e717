"""One piece of work at a time, beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], None]) -> None:
        """Starts `work` once what was begun before has ended. Raises what that raised."""
        self.settle()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised where it is waited for
                self._failed = error

        # Not waited for by a process that ends for another reason: what is half done is no checkpoint.
        self._thread = threading.Thread(target=run, name="background", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Waits for what was begun. Raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
