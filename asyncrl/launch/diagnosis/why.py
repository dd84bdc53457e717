"""Who waits for whom, for what, since when, and who is to blame. Pure: what is known is an argument.

A role that waits names a cause; from it follow the roles that could end the wait. Where the chain of those ends, at one
that does not wait itself, or closes to a ring, there is the blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

LEARNER_TICKETS = ("admission", "capacity", "disk", "no weights", "all ")
"""Beginnings of the buffer's reasons to give no ticket that the learner, by training or publishing, ends."""


@dataclass(frozen=True, slots=True)
class RoleState:
    name: str
    pid: int
    ready: bool
    cause: str | None
    """What it waits for; None: it works."""
    on: str
    """On whom, or for what exactly; may be empty."""
    for_s: float
    """Seconds since the wait began, or since it last said something."""
    process: str = "running"
    """As the system has it: running, stopped (SIGSTOP), gone."""

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Explanation:
    lines: tuple[str, ...]
    blamed: tuple[str, ...]
    """The roles whose restart could help; empty: nobody waits for a role."""


def explain(roles: Sequence[RoleState], buffer: Mapping[str, object] | None) -> Explanation:
    """`buffer`: its `status()`; None when it does not answer, or was not asked."""
    edges = {role.name: awaited(role, roles) for role in roles if role.cause is not None}
    lines = [_line(role, edges.get(role.name, ())) for role in roles]
    lines += _old_weights(buffer, {role.name for role in roles})
    lines += [f"deadlock: {' -> '.join(ring)}: each waits for the next" for ring in (_rings(edges))]
    blamed = _blamed(roles, edges)
    if blamed:
        lines.append(f"the others wait for {', '.join(blamed)}")
    return Explanation(tuple(lines), blamed)


def awaited(role: RoleState, roles: Sequence[RoleState]) -> tuple[str, ...]:
    """Who could end this wait: any one of them. Those that wait themselves only where no other is there."""
    others = [r for r in roles if r.name != role.name]
    match role.cause:
        case "batch" | "evaluation":
            kind = "actor"
        case "ticket":
            why = role.on.removeprefix("buffer: ")
            kind = "learner" if why.startswith(LEARNER_TICKETS) else "actor" if "last episodes" in why else "buffer"
            if "holds weights" in why:
                return ()  # its own update is under way
        case "buffer" | "put":
            kind = "buffer"
        case "weights":
            kind = "learner" if role.on else ""
        case "orders":
            kind = "learner"
        case _:
            return ()
    found = [r for r in others if r.kind == kind]
    free = [r for r in found if r.cause is None or r.process != "running"]
    return tuple(r.name for r in free or found)


def _line(role: RoleState, awaits: Sequence[str]) -> str:
    if role.process == "stopped":
        return f"{role.name} is stopped, as by SIGSTOP: `kill -CONT {role.pid}` lets it go on"
    if role.process != "running":
        return f"{role.name} is {role.process} (pid {role.pid})"
    if role.cause is None:
        return f"{role.name} {'works' if role.ready else 'is still starting'}; it last said so {role.for_s:.0f} s ago"
    on = f" ({role.on})" if role.on and role.on not in awaits else ""
    whom = f" from {', '.join(awaits)}" if awaits else ""
    return f"{role.name} waits for {role.cause}{on}{whom} since {role.for_s:.0f} s"


def _old_weights(buffer: Mapping[str, object] | None, there: Set[str]) -> list[str]:
    """Actors that get no tickets for it; the buffer also remembers those that have left."""
    held = (buffer or {}).get("held")
    if buffer is None or not isinstance(held, Mapping) or not isinstance(buffer["published"], int):
        return []
    newest = (buffer["branch"], buffer["published"])
    behind = {actor: tuple(version) for actor, version in held.items() if actor in there and tuple(version) < newest}
    return [
        f"{actor} holds weights (branch {b}, version {v}), and {newest[1]} of branch {newest[0]} are published"
        for actor, (b, v) in sorted(behind.items())
    ]


def _rings(edges: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Rings of roles that wait for each other, each once.

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
    # Buffers have no state that a restart would lose, nor any that it would mend: last in a ring.
    ringed = {name for ring in _rings(edges) for name in ring}
    return tuple(sorted(ends)) or tuple(sorted(ringed))
