"""Reports a stall: who waits for whom as an event, and the stacks of all processes in the logs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from asyncrl.launch.backends.local import Backend, RoleProcess
from asyncrl.launch.diagnosis import stacks, waits
from asyncrl.launch.diagnosis.why import explain
from asyncrl.run_folder import RunFolder

if TYPE_CHECKING:
    from asyncrl.tracking.collector import Collector


class StallReport:
    """The last stall of a run."""

    def __init__(
        self, run: RunFolder, processes: Mapping[str, RoleProcess], backend: Backend, collector: Collector
    ) -> None:
        self._run, self._processes, self._backend, self._collector = run, processes, backend, collector
        self._stacks: threading.Thread | None = None
        self.text = ""
        self.blamed: tuple[str, ...] = ()
        """The roles that the others waited for."""

    @property
    def writing(self) -> bool:
        """The stacks are still being written."""
        return self._stacks is not None and self._stacks.is_alive()

    def report(self, action: str) -> None:
        """Reports a stall that has just been noticed; `action` is what follows (`launch.on_stall`)."""
        explanation = explain(waits.role_states(self._processes, self._collector), None)
        self.text = "; ".join(filter(None, [*explanation.lines, self._backend.waits()]))
        self.blamed = explanation.blamed
        self._collector.event("stall", text=self.text, blamed=list(self.blamed), action=action)
        self._stacks = stacks.start_writing(self._run, explanation.lines)
