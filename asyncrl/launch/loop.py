"""The launcher's loop: the processes of one run as subprocesses of this one, started, watched, stopped.

    starts ──────────> guardian          ends everything, removes sockets and weights, when the launcher is gone
       │
       ├─────────────> buffer, learner, actor-0 .. actor-n          each in a session of its own, output in logs/
       │                  │ reports                │ dies
       │                  ▼                        ▼
    the loop: poll the collector ──> ended? ── within the budget: start again (learner: --resume)
       │      what unblocks it: a report, or a fifth of a second
       ▼
    the learner ends, with 0: the run is finished      Ctrl-C, SIGTERM: stop in order      a second Ctrl-C: kill
       └──> stop actors, then the learner (it writes its checkpoint), then the buffer

Nothing here decides: supervision.py does.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.launch.backends.local import Backend, Local, Started
from asyncrl.launch.diagnosis import stall
from asyncrl.launch.diagnosis.why import RoleState, explain
from asyncrl.launch.elastic import Actors
from asyncrl.launch.guardian import Guardian
from asyncrl.launch.processes import Role, adopt_orphans, reap_orphans
from asyncrl.launch.roles import actor
from asyncrl.launch.supervision import Outcome, RestartBudget, after_exit
from asyncrl.process.logs import why_it_ended
from asyncrl.run_folder import RunFolder

if TYPE_CHECKING:
    from asyncrl.tracking.collector import Collector

POLL_S = 0.2
KILL_S = 10.0
FULL_BYTES = 1 << 20
ORDER = ("actor", "learner", "buffer", "weights")
"""In which the roles are stopped: nothing is generated for a buffer or a learner that is gone."""


class Launcher:
    """Runs `roles` until the learner is done, the user stops it, or it cannot go on."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        roles: Sequence[Role],
        collector: Collector,
        backend: Backend | None = None,
    ) -> None:
        """`backend`: who starts the processes; None: they are subprocesses of this one. It is closed at the end."""
        self._run = run
        self._backend = backend or Local(run, config)
        self._config, self._limits = config, config.launch
        self._actors = Actors(run)
        self._leaving: dict[str, float] = {}
        """Actors that were told to stop because they are no longer wanted, and by when they are killed."""
        self._drain_s = config.actors.drain_s
        self._roles = {role.name: role for role in roles}
        self._collector = collector
        self._processes: dict[str, Started] = {}
        self._noted: dict[str, tuple[int, float]] = {}
        self._budgets = {
            name: RestartBudget(self._limits.restarts, self._limits.restart_window_s) for name in self._roles
        }
        self._interrupts = 0
        self._progress = time.monotonic()
        self._stall: stall.Stall | None = None
        self._noted_waits = 0.0

    def supervise(self) -> Outcome:
        """Returns when every process of the run has ended. Raises RunError when one cannot be started."""
        adopt_orphans()
        with self._signals():
            guardian = Guardian(self._run)
            try:
                self._actors.begin(name for name in self._roles if name.startswith("actor-"))
                for name in self._roles:
                    self._start(name)
                while (outcome := self._look()) is None:
                    guardian.ensure()
            finally:
                self._stop()
                self._backend.close()
                self._collector.finish()  # before the guardian ends what is left: a tracker has processes too
                guardian.release()
        return outcome

    def _look(self) -> Outcome | None:
        """One turn of the loop."""
        for event in self._collector.poll(POLL_S):
            if event.kind in ("ready", "step", "eval", "checkpoint", "published"):
                self._progress = time.monotonic()
        if self._interrupts:
            return Outcome(
                "interrupted", 130, f"stopped by the user; go on with: asyncrl launch --resume {self._run.path}"
            )
        now = time.monotonic()
        self._adapt(now)
        for name in self._processes:
            if name in self._leaving:
                continue
            process = self._processes[name]  # of now: those that are together start anew together
            if (code := process.ended()) is not None:
                why = process.killed_for or why_it_ended(process.log, code)
            elif name not in self._collector.ready and now - process.started > self._limits.start_s:
                process.kill(f"not ready within launch.start_s = {self._limits.start_s:g} s")
                continue
            else:
                continue
            leader = self._roles[name].leader
            if leader and code == 0:  # told to by its leader, whose end says what that means
                continue
            outcome = self._disk_is_full() if code else None
            if outcome is None and process.lost and self._roles[name].kind == "actor":
                self._restart(name, why)  # machines that come and go are no fault of what ran on them
                continue
            outcome = outcome or after_exit(name, code, why, self._budgets[leader or name], now)
            if outcome is not None:
                if outcome.kind == "failed":
                    self._collector.exited(name, why)
                return outcome
            self._restart(name, why)
        self._note()
        reap_orphans(process.identity[0] for process in self._processes.values() if process.identity)
        if now - self._noted_waits > stall.NOTE_S:
            self._noted_waits = now
            with contextlib.suppress(OSError):  # a full disk: `asyncrl why` then shows what was
                stall.note(self._run, self._states())
        if self._stall is None and now - self._progress > self._limits.stall_s:
            self._stall = self._stalled()
        elif self._stall is not None and not self._stall.writing.is_alive():
            ended, self._stall = self._stall, None
            if ended.since == self._progress:  # it did not go on by itself meanwhile
                self._progress = now
                return self._act_on(ended)
        return None

    def _stalled(self) -> stall.Stall:
        """Says who waits for whom, and has everybody's stacks written."""
        explanation = explain(self._states(), None)
        text = "; ".join(filter(None, [*explanation.lines, self._backend.waits()]))
        self._collector.event("stall", text=text, blamed=list(explanation.blamed), action=self._limits.on_stall)
        return stall.Stall.begin(self._run, explanation, text, self._progress)

    def _act_on(self, stalled: stall.Stall) -> Outcome | None:
        """What `launch.on_stall` says."""
        if self._limits.on_stall == "abort":
            return Outcome("failed", 1, f"no progress for launch.stall_s = {self._limits.stall_s:g} s: {stalled.text}")
        if self._limits.on_stall == "restart":
            for process in (self._processes[name] for name in stalled.blamed if name in self._processes):
                process.kill(f"no progress for launch.stall_s = {self._limits.stall_s:g} s")
        return None

    def _states(self) -> list[RoleState]:
        ready, waits, states = self._collector.ready, self._collector.waiting, []
        for name, process in self._processes.items():
            wait, pid = waits.get(name), (process.identity or (0, 0.0))[0]
            cause, on = (wait.cause, wait.on) if wait else (None, "")
            for_s = wait.for_s if wait else self._collector.silent_s(name)
            state = stall.process_state(pid) if process.here else "running"
            states.append(RoleState(name, pid if process.here else 0, name in ready, cause, on, for_s, state))
        return states

    def _adapt(self, now: float) -> None:
        """To the actors that are wanted now."""
        wanted = self._actors.changed()
        for name in wanted or ():
            if name not in self._roles:
                self._roles[name] = actor(self._run, self._config, name)
                self._budgets[name] = RestartBudget(self._limits.restarts, self._limits.restart_window_s)
                self._collector.event("joins", text=name)
                self._start(name)
        for name, process in list(self._processes.items()):
            if wanted is not None and process.role.kind == "actor" and name not in (*wanted, *self._leaving):
                self._leaving[name] = now + self._limits.stop_s + self._drain_s
                self._collector.event("leaves", text=name)
                process.stop()
            if name in self._leaving:
                if process.ended() is not None:
                    del self._processes[name], self._roles[name], self._budgets[name], self._leaving[name]
                    self._backend.forget(name)
                    self._collector.exited(name, "left")
                elif now > self._leaving[name]:
                    process.kill("did not stop in time")

    def _disk_is_full(self) -> Outcome | None:
        """Where nothing can be written a process dies without a word, and would again."""
        for folder in (self._run.path, self._run.ledger(self._config)):
            # A ledger of another host is none of this one's.
            if folder.is_dir() and shutil.disk_usage(folder).free <= FULL_BYTES:
                why = f"the disk of {folder} is full: free some space; asyncrl launch --resume goes on from there"
                return Outcome("failed", 1, why)
        return None

    def _restart(self, name: str, why: str) -> None:
        """Starts it anew, and with it all that follow the same leader: the survivors wait for who is gone."""
        leader = self._roles[name].leader or name
        together = [r.name for r in self._roles.values() if leader in (r.name, r.leader)]
        for other in (self._processes[n] for n in together if n != name):
            other.kill(f"{name} died")
            until = time.monotonic() + KILL_S
            while other.ended() is None:
                if time.monotonic() > until:
                    raise RunError(f"{other.role.name} does not end although it was killed.")
                time.sleep(0.01)
        self._run.rendezvous.unlink(missing_ok=True)
        for n in together:
            self._collector.restarted(n, why if n == name else f"{name} died")
            self._start(n, again=True)

    def _start(self, name: str, *, again: bool = False) -> None:
        try:
            self._processes[name] = self._backend.start(self._roles[name], again=again)
        except OSError as error:
            raise RunError(f"{name} cannot be started: {error.strerror} ({error.filename}).") from error
        self._note()

    def _note(self) -> None:
        """Which process a role is: `processes` on this host, `elsewhere` on others, where the pid says nothing here."""
        known = {name: found for name, process in self._processes.items() if (found := process.identity)}
        if known == self._noted:
            return
        record = self._run.record()
        here, there = dict(record["processes"]), dict(record.get("elsewhere", {}))
        for name, (pid, created) in known.items():
            place, other = (here, there) if self._processes[name].here else (there, here)
            place[name] = [pid, created]
            other.pop(name, None)
        self._noted = known
        self._run.note(processes=here, elsewhere=there)

    def _stop(self) -> None:
        """In order, each kind within `launch.stop_s`; at once after a second Ctrl-C. What a kill does not end within
        `KILL_S`, being stuck in the kernel, is left to it."""
        for kind in ORDER:
            running = [p for p in self._processes.values() if p.role.kind == kind and p.ended() is None]
            for process in running:
                process.stop()
            patience_s = self._limits.stop_s + (self._drain_s if kind == "actor" else 0.0)
            deadline, killed = time.monotonic() + patience_s, False
            while running := [p for p in running if p.ended() is None]:
                for process in running:
                    leader = self._processes.get(process.role.leader)
                    if leader is not None and leader.ended() is not None:
                        process.kill("its leader has ended")
                self._collector.poll(0.05)
                if killed and time.monotonic() > deadline:
                    for process in running:
                        self._collector.exited(process.role.name, "it does not end although it was killed")
                    break
                if not killed and (self._interrupts > 1 or time.monotonic() > deadline):
                    for process in running:
                        process.kill(f"killed: not stopped within {patience_s:g} s")
                        if self._interrupts <= 1:
                            self._collector.exited(process.role.name, process.killed_for)
                    deadline, killed = time.monotonic() + KILL_S, True

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def interrupt(_number: int, _frame: FrameType | None) -> None:
            self._interrupts += 1

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, interrupt) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
