"""Plans how the roles of a run are stopped, one kind after the other. Pure: time is an argument.

actors ──> learner ──> scorers ──> buffer ──> weights        the next kind follows when no process of the former runs
  │
  └─ Stop ──within its time──> ended
       └─ its time is up, its leader has ended, or a second Ctrl-C ──> Kill ──after KILL_S──> GiveUp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ORDER = ("actor", "learner", "scorer", "buffer", "weights")
"""The kinds in the order in which they are stopped: nothing is generated for a buffer or learner that has ended."""
KILL_S = 10.0
"""If a process still exists so many seconds after SIGKILL, it is stuck in a system call; the launcher stops waiting for
it."""


@dataclass(frozen=True, slots=True)
class Running:
    """A process that has not ended."""

    name: str
    kind: str
    leader_ended: bool = False
    """The role that it follows has ended."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the process to stop in order."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    name: str
    why: str
    report: bool
    """The kill is an event of the run, not what the user or the plan asked for."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Wait no longer for a process that a kill does not end."""

    name: str


Action = Stop | Kill | GiveUp


@dataclass(slots=True)
class Shutdown:
    """
    >>> shutdown = Shutdown(stop_s=20.0, drain_s=5.0)
    >>> actor, learner = Running("actor-0", "actor"), Running("learner", "learner")
    >>> shutdown.plan(0.0, [actor, learner], interrupts=0)
    [Stop(name='actor-0')]
    >>> shutdown.plan(24.0, [actor, learner], interrupts=0)
    []
    >>> shutdown.plan(25.1, [actor, learner], interrupts=0)
    [Kill(name='actor-0', why='killed: not stopped within 25 s', report=True)]
    >>> shutdown.plan(25.2, [learner], interrupts=0)
    [Stop(name='learner')]
    """

    stop_s: float
    """Seconds that each kind has to stop in order."""
    drain_s: float
    """Seconds that actors have in addition, to finish episodes or hand them back."""
    _stopped: dict[str, float] = field(default_factory=dict)
    _killed: dict[str, float] = field(default_factory=dict)
    _given_up: set[str] = field(default_factory=set)

    def plan(self, now: float, running: Sequence[Running], interrupts: int) -> list[Action]:
        """The actions that are due. `interrupts` counts Ctrl-C; the second one kills at once."""
        left = [process for process in running if process.name not in self._given_up]
        kind = next((kind for kind in ORDER if any(process.kind == kind for process in left)), None)
        due = (self._next(now, process, interrupts) for process in left if process.kind == kind)
        return [action for action in due if action is not None]

    def finished(self, running: Sequence[Running]) -> bool:
        """No process is left to wait for."""
        return all(process.name in self._given_up for process in running)

    def _next(self, now: float, process: Running, interrupts: int) -> Action | None:
        name = process.name
        if name in self._killed:
            if now - self._killed[name] <= KILL_S:
                return None
            self._given_up.add(name)
            return GiveUp(name)
        if name not in self._stopped:
            self._stopped[name] = now
            return Stop(name)
        if process.leader_ended:
            self._killed[name] = now
            return Kill(name, "its leader has ended", report=False)
        patience_s = self.stop_s + (self.drain_s if process.kind == "actor" else 0.0)
        if interrupts > 1 or now - self._stopped[name] > patience_s:
            self._killed[name] = now
            return Kill(name, f"killed: not stopped within {patience_s:g} s", report=interrupts <= 1)
        return None
