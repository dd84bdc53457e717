"""The roles of a live run, with the process and the restart budget of each; starts and stops them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from asyncrl.config.launch import LaunchConfig
from asyncrl.errors import RunError
from asyncrl.launch.backends.local import Backend, RoleProcess
from asyncrl.launch.processes import Role
from asyncrl.launch.supervision.shutdown import KILL_S, Action, Kill, Running, Stop
from asyncrl.launch.supervision.supervision import RestartBudget
from asyncrl.run_folder import RunFolder

if TYPE_CHECKING:
    from asyncrl.tracking.collector import Collector


class ProcessTable:
    def __init__(
        self, run: RunFolder, roles: Sequence[Role], limits: LaunchConfig, backend: Backend, collector: Collector
    ) -> None:
        self._run, self._limits, self._backend, self._collector = run, limits, backend, collector
        self.processes: dict[str, RoleProcess] = {}
        self._roles: dict[str, Role] = {}
        self._budgets: dict[str, RestartBudget] = {}
        self._recorded: dict[str, tuple[int, float]] = {}
        for role in roles:
            self._add(role)

    @property
    def names(self) -> list[str]:
        return list(self._roles)

    def __contains__(self, name: str) -> bool:
        return name in self._roles

    def start_all(self, interrupted: Callable[[], bool]) -> None:
        """Starts the roles in their order, none any more once the launcher is `interrupted`. Raises RunError when one
        cannot be started."""
        for name in self._roles:
            if interrupted():
                return
            self._start(name)

    def join(self, role: Role) -> None:
        """Adds a role to the run and starts it. Raises RunError when it cannot be started, and ConfigError when this
        machine has no room for it; without a process the table is as it was."""
        self._add(role)
        try:
            self._start(role.name)
        finally:
            if role.name not in self.processes:
                del self._roles[role.name], self._budgets[role.name]
                self._backend.forget(role.name)

    def remove(self, name: str) -> None:
        """Forgets a role whose process has ended and is not started again."""
        del self.processes[name], self._roles[name], self._budgets[name]
        self._backend.forget(name)

    def budget(self, name: str) -> RestartBudget:
        """The restart budget of the role, or of the leader that it follows."""
        return self._budgets[self._roles[name].leader or name]

    def restart(self, name: str, why: str) -> None:
        """Starts an ended role again, with all that follow the same leader: they wait for the one that ended. Raises
        RunError."""
        leader = self._roles[name].leader or name
        ranks = [role.name for role in self._roles.values() if leader in (role.name, role.leader)]
        others = [self.processes[rank] for rank in ranks if rank != name]
        for other in others:
            other.kill(f"{name} died")
        until = time.monotonic() + KILL_S
        while left := [other.role.name for other in others if other.ended() is None]:
            if time.monotonic() > until:
                raise RunError(f"{', '.join(left)}: not ended although killed.")
            time.sleep(0.01)
        self._run.rendezvous.unlink(missing_ok=True)
        for rank in ranks:
            self._collector.restarted(rank, why if rank == name else f"{name} died")
            self._start(rank, again=True)

    def running(self) -> list[Running]:
        """The processes that have not ended, for the shutdown plan."""
        ended = {name for name, process in self.processes.items() if process.ended() is not None}
        return [
            Running(name, process.role.kind, process.role.leader in ended)
            for name, process in self.processes.items()
            if name not in ended
        ]

    def kill(self, names: Sequence[str], why: str) -> None:
        """Kills the processes of these roles, as far as they exist."""
        for name in names:
            if (process := self.processes.get(name)) is not None:
                process.kill(why)

    def carry_out(self, action: Action) -> None:
        """Stops or kills a process, as the shutdown plan says."""
        process = self.processes[action.name]
        if isinstance(action, Stop):
            process.stop()
        elif isinstance(action, Kill):
            process.kill(action.why)
            if action.report:
                self._collector.exited(action.name, action.why)
        else:
            self._collector.exited(action.name, "it does not end although it was killed")

    def record(self) -> None:
        """Records pid and start time of each process in run.json: under `processes` on this host, under `elsewhere` on
        others, where a pid means nothing on this one."""
        identities = {name: identity for name, process in self.processes.items() if (identity := process.identity)}
        if identities == self._recorded:
            return
        record = self._run.record()
        here, elsewhere = dict(record["processes"]), dict(record.get("elsewhere", {}))
        for name, (pid, created) in identities.items():
            place, other = (here, elsewhere) if self.processes[name].local else (elsewhere, here)
            place[name] = [pid, created]
            other.pop(name, None)
        self._recorded = identities
        self._run.note(processes=here, elsewhere=elsewhere)

    def _add(self, role: Role) -> None:
        self._roles[role.name] = role
        self._budgets[role.name] = RestartBudget(self._limits.restarts, self._limits.restart_window_s)

    def _start(self, name: str, *, again: bool = False) -> None:
        try:
            self.processes[name] = self._backend.start(self._roles[name], again=again)
        except OSError as error:
            raise RunError(f"{name} cannot be started: {error.strerror} ({error.filename}).") from error
        self.record()
