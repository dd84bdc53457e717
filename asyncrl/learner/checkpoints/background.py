"""One piece of work at a time in a thread, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable

from asyncrl.errors import RunError


class Background:
    def __init__(self, deadline_s: float) -> None:
        """`deadline_s`: seconds to wait for the work to finish (`learner.checkpoint_s`)."""
        self._deadline_s = deadline_s
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], None]) -> None:
        """Starts `work` once the work before it has ended. Raises as `settle` does."""
        self.settle()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised by settle
                self._failed = error

        # A process that ends for another reason does not wait for it: half a checkpoint is of no use.
        self._thread = threading.Thread(target=run, name="background", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Waits for the work. Raises what it raised, and RunError when it does not end in time."""
        if self._thread is not None:
            self._thread.join(self._deadline_s)
            if self._thread.is_alive():
                raise RunError(
                    f"the checkpoint is still not written after learner.checkpoint_s = {self._deadline_s:g} s: the "
                    "disk hangs, or is too slow for it. Look at the disk or raise learner.checkpoint_s; then resume "
                    "from the previous checkpoint with --resume."
                )
            self._thread = None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
