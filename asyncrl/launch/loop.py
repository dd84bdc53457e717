"""The launcher's loop: starts the processes of one run, watches them, starts them again, stops them.

    actor-0 .. actor-n ───trajectories───> buffer ───batches───> learner, learner-1 ..
        ▲  ▲                                 │                      │
        │  └──────────────tickets────────────┘                      │
        └──────── weights: shared memory, or the process `weights` ─┘

    launcher: starts all of them, and the guardian, which ends them when the launcher is gone
        │
        ▼   a turn of the loop, at a report or after a fifth of a second
    take reports ──> interrupted? ──> actors.json changed? ──> a process ended? ──> no progress?
                        │                  │                      │ supervision/     │ diagnosis/stall.py
                        │ Ctrl-C           ▼                      ▼                  ▼
                        │ SIGTERM      start, stop actors     start it again     say who waits for whom, write stacks,
                        ▼                                         │              then what launch.on_stall says
    supervision/shutdown.py: stop actors, learner (its <── learner done, or a failure that would repeat
    checkpoint first), buffer, weights; a second Ctrl-C kills

Nothing is decided here: the files named in the picture decide, and are pure.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.launch.backends.local import Backend, Local
from asyncrl.launch.diagnosis.stall import StallWatch
from asyncrl.launch.diagnosis.stall_report import StallReport
from asyncrl.launch.diagnosis.waits import WaitsFile
from asyncrl.launch.elastic import Membership
from asyncrl.launch.guardian import Guardian
from asyncrl.launch.preflight import full_disk
from asyncrl.launch.processes import Role, adopt_orphans, reap_orphans
from asyncrl.launch.supervision.interrupts import Interrupts
from asyncrl.launch.supervision.process_table import ProcessTable
from asyncrl.launch.supervision.shutdown import Shutdown
from asyncrl.launch.supervision.supervision import Outcome, after_exit
from asyncrl.process.logs import why_it_ended
from asyncrl.run_folder import RunFolder

if TYPE_CHECKING:
    from asyncrl.tracking.collector import Collector

POLL_S = 0.2
STOP_POLL_S = 0.05


class Launcher:
    """Runs `roles` until the learner is done, the user stops the run, or it cannot go on."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        roles: Sequence[Role],
        collector: Collector,
        interrupts: Interrupts,
        backend: Backend | None = None,
    ) -> None:
        """`backend` starts the processes and is closed at the end; None: they are subprocesses of this one."""
        self._run, self._config, self._limits = run, config, config.launch
        self._collector = collector
        self._backend = backend or Local(run, config)
        self._table = ProcessTable(run, roles, self._limits, self._backend, collector)
        self._membership = Membership(run, config, self._table, collector)
        self._watch = StallWatch(self._limits.stall_s, time.monotonic())
        self._stall = StallReport(run, self._table.processes, self._backend, collector)
        self._waits = WaitsFile(run, self._table.processes, collector)
        self._interrupts = interrupts

    def supervise(self) -> Outcome:
        """Returns when every process of the run has ended. Raises RunError when one cannot be started."""
        adopt_orphans()
        guardian = Guardian(self._run)
        try:
            self._membership.begin()
            self._table.start_all(lambda: self._interrupts.count > 0)
            while (outcome := self._turn()) is None:
                guardian.ensure()
        finally:
            self._stop()
            self._backend.close()
            self._collector.finish()  # before the guardian ends what is left: a tracker has processes too
            guardian.release()
        return outcome

    def _turn(self) -> Outcome | None:
        """Runs one turn of the loop; gives the run's outcome once there is one."""
        events = self._collector.poll(POLL_S)
        now = time.monotonic()
        self._watch.note(now, (event.kind for event in events))
        if self._interrupts.count:
            why = f"stopped by the user; continue with: asyncrl launch --resume {shlex.quote(str(self._run.path))}"
            return Outcome("interrupted", 130, why)
        self._membership.apply(now)
        for name in list(self._table.processes):
            if name not in self._membership.leaving and (outcome := self._look_at(name, now)) is not None:
                return outcome
        self._table.record()
        reap_orphans(p.identity[0] for p in self._table.processes.values() if p.identity)
        self._waits.write(now)
        return self._check_progress(now)

    def _look_at(self, name: str, now: float) -> Outcome | None:
        """Restarts a role that ended, or returns the run's outcome; kills one that is not ready in time."""
        process = self._table.processes[name]  # a leader's restart may have replaced it in this turn
        if (code := process.ended()) is None:
            if name not in self._collector.ready and now - process.started > self._limits.start_s:
                process.kill(f"not ready within launch.start_s = {self._limits.start_s:g} s")
            return None
        if process.role.leader and code == 0:
            return None  # its leader asked it to end, and the leader's own end decides
        why = process.killed_for or why_it_ended(process.log, code)
        outcome = full_disk(self._run.path, self._run.ledger(self._config)) if code else None
        # A lost machine does not count towards launch.restarts.
        host_lost = process.lost and process.role.kind == "actor"
        if outcome is None and not host_lost:
            outcome = after_exit(name, code, why, self._table.budget(name), now)
        if outcome is None:
            self._table.restart(name, why)
        elif outcome.kind == "failed":
            self._collector.exited(name, why)
        return outcome

    def _check_progress(self, now: float) -> Outcome | None:
        """Reports a stall, and then does what `launch.on_stall` says."""
        due = self._watch.look(now, reporting=self._stall.writing)
        if due == "report":
            self._stall.report(self._limits.on_stall)
        if due != "act" or self._limits.on_stall == "warn":
            return None
        why = f"no progress for launch.stall_s = {self._limits.stall_s:g} s"
        if self._limits.on_stall == "abort":
            return Outcome("failed", 1, f"{why}: {self._stall.text}")
        self._table.kill(self._stall.blamed, why)
        return None

    def _stop(self) -> None:
        """Stops every process by the plan of shutdown.py."""
        shutdown = Shutdown(self._limits.stop_s, self._config.actors.drain_s)
        while not shutdown.finished(running := self._table.running()):
            for action in shutdown.plan(time.monotonic(), running, self._interrupts.count):
                self._table.carry_out(action)
            self._collector.poll(STOP_POLL_S)
