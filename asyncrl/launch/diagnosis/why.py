"""Explains a run's waits: who waits for whom, for what, since when, and who is to blame. Pure.

A role that waits names a cause, from which the roles follow that could end the wait. To blame are the roles at which a
chain of waits ends, those that do not wait themselves, or else the roles of a ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

LEARNER_TICKETS = ("admission", "capacity", "disk", "no weights", "all ", "no evaluation")
"""How the buffer's reasons to issue no ticket begin that the learner ends, by training or publishing."""


_UNSCORED = "not scored yet"
"""In the buffer's reason to give no batch: complete groups wait for a teacher's scores."""


@dataclass(frozen=True, slots=True)
class RoleState:
    name: str
    pid: int
    ready: bool
    cause: str | None
    """What the role waits for; None: it works."""
    on: str
    """Details of the wait: the role or the thing that is missing; may be empty."""
    for_s: float
    """Seconds since the wait began; of a role that works, since its last report."""
    process: str = "running"
    """The state that the system reports: running, stopped (SIGSTOP), gone."""

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Explanation:
    lines: tuple[str, ...]
    blamed: tuple[str, ...]
    """The roles whose restart could help; empty when no role waits for another."""


def explain(roles: Sequence[RoleState], buffer: Mapping[str, object] | None) -> Explanation:
    """`buffer` is its `status()`; None when it does not answer, or was not asked."""
    edges = {role.name: _awaited(role, roles) for role in roles if role.cause is not None}
    lines = [_line(role, edges.get(role.name, ())) for role in roles]
    lines += _old_weights(buffer, {role.name for role in roles})
    lines += [f"deadlock: {' -> '.join(ring)}: each waits for the next" for ring in _rings(edges)]
    blamed = _blamed(roles, edges)
    if blamed:
        lines.append(f"the others wait for {', '.join(blamed)}")
    return Explanation(tuple(lines), blamed)


def _awaited(role: RoleState, roles: Sequence[RoleState]) -> tuple[str, ...]:
    """The roles of which any one could end this wait. Roles that wait themselves count only where there is no other."""
    kind = _awaited_kind(role)
    peers = [r for r in roles if r.kind == kind and r.name != role.name]
    working = [r for r in peers if r.cause is None or r.process != "running"]
    return tuple(r.name for r in working or peers)


def _awaited_kind(role: RoleState) -> str:
    """The kind of role that could end this wait; empty: none."""
    match role.cause:
        case "batch" if _UNSCORED in role.on:
            return "scorer"
        case "batch" | "evaluation":
            return "actor"
        case "groups":
            return "actor"
        case "ticket":
            return _ticket_giver(role.on.removeprefix("buffer: "))
        case "buffer" | "put":
            return "buffer"
        case "weights" if role.on:
            return "learner"
        case "orders":
            return "learner"
    return ""


def _ticket_giver(reason: str) -> str:
    """The kind of role that ends the buffer's `reason` to issue no ticket."""
    if "holds weights" in reason:
        return ""  # the actor's own update is under way
    if reason.startswith(LEARNER_TICKETS):
        return "learner"
    return "actor" if "last episodes" in reason else "buffer"


def _line(role: RoleState, awaits: Sequence[str]) -> str:
    if role.process == "stopped":
        return f"{role.name} is stopped (SIGSTOP): `kill -CONT {role.pid}` resumes it"
    if role.process != "running":
        return f"{role.name} is {role.process} (pid {role.pid})"
    if role.cause is None:
        return f"{role.name} {'works' if role.ready else 'is still starting'}; it last reported {role.for_s:.0f} s ago"
    on = f" ({role.on})" if role.on and role.on not in awaits else ""
    whom = f" from {', '.join(awaits)}" if awaits else ""
    return f"{role.name} waits for {role.cause}{on}{whom} for {role.for_s:.0f} s"


def _old_weights(buffer: Mapping[str, object] | None, roles: Set[str]) -> list[str]:
    """Lines about actors that get no tickets because their weights are old. `roles`: the live ones; the buffer also
    remembers actors that have left, and those that play an evaluation hold the version to which it is pinned."""
    versions = (buffer or {}).get("held")
    if buffer is None or not isinstance(versions, Mapping) or not isinstance(buffer["published"], int):
        return []
    newest, players = (buffer["branch"], buffer["published"]), buffer.get("players")
    training = roles - set(players if isinstance(players, list) else ())
    behind = {
        actor: tuple(version) for actor, version in versions.items() if actor in training and tuple(version) < newest
    }
    return [
        f"{actor} holds weights (branch {b}, version {v}), and {newest[1]} of branch {newest[0]} are published"
        for actor, (b, v) in sorted(behind.items())
    ]


def _rings(edges: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Rings of roles that wait for each other, each of them once.

    >>> _rings({"learner": ["actor-0"], "actor-0": ["learner"], "actor-1": ["learner"]})
    [('learner', 'actor-0', 'learner')]
    """
    rings: dict[frozenset[str], tuple[str, ...]] = {}
    for start in edges:
        path = [start]
        while (following := edges.get(path[-1])) and path[-1] not in path[:-1]:
            path.append(following[0])
        if path[-1] in path[:-1]:
            ring = path[path.index(path[-1]) :]
            rings.setdefault(frozenset(ring), tuple(ring))
    return list(rings.values())


def _blamed(roles: Sequence[RoleState], edges: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    halted = tuple(r.name for r in roles if r.process != "running")
    if halted:
        return halted
    ends = {name for awaits in edges.values() for name in awaits if name not in edges}
    ringed = {name for ring in _rings(edges) for name in ring}
    return tuple(sorted(ends)) or tuple(sorted(ringed))
