"""Kills or halts processes of a job, and simulates the loss of a host."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal

from asyncrl.buffer.client import BufferClient
from asyncrl.chaos.injector import Injector
from asyncrl.chaos.plan import Fault
from asyncrl.config import Config
from asyncrl.errors import AsyncRLError
from asyncrl.launch.processes import alive
from asyncrl.run_folder import RunFolder

CAUSED_S = 5.0


class Processes(Injector):
    def __init__(self, config: Config) -> None:
        self._config = config
        self._halted: dict[Fault, list[int]] = {}

    def open(self, run: RunFolder) -> None:
        self._run = run

    def ready(self, fault: Fault) -> bool:
        """Whether its processes live and, where the ledger would be lost, a checkpoint can restore it."""
        lost = fault.kind == "node" and "buffer" in fault.roles
        return all(map(self._pid, fault.roles)) and not (lost and not any(self._run.checkpoints.glob("step-*")))

    def begin(self, fault: Fault) -> str:
        pids = [pid for pid in map(self._pid, fault.roles) if pid]
        details = f"pid {', '.join(map(str, pids))}"
        if fault.kind == "stop":
            self._halted[fault] = pids
            _signal(pids, signal.SIGSTOP)
            return details
        if any(role.startswith("learner") for role in fault.roles):
            details += self._tell_caused()
        if fault.kind == "node" and "buffer" in fault.roles:
            _signal(pids, signal.SIGSTOP)  # writes nothing from here on
            ledger = self._run.ledger(self._config)
            lost = ledger.with_name(f".{ledger.name}.lost")
            ledger.rename(lost)  # before a new buffer looks for it
            _signal(pids, signal.SIGKILL)
            shutil.rmtree(lost)
            return f"{details}; its disk {ledger} with it"
        _signal(pids, signal.SIGKILL)
        return details

    def end(self, fault: Fault) -> None:
        _signal(self._halted.pop(fault, []), signal.SIGCONT)

    def _tell_caused(self) -> str:
        """Tells the buffer that the learner's death is deliberate and does not count against its batch."""
        client = BufferClient(self._run.address("buffer"), identity=f"chaos-{os.getpid()}", deadline_s=CAUSED_S)
        try:
            client.caused()
            return ""
        except AsyncRLError as error:
            return f"; the buffer was not told that the learner's death is deliberate: {error}"
        finally:
            client.close()

    def _pid(self, role: str) -> int:
        """The pid of the role's process; 0: it does not live."""
        pid, created = self._run.record()["processes"].get(role, (0, 0.0))
        return int(pid) if pid and alive(pid, created) else 0


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
