"""Plans the faults of a run, and compares its final success. Pure: the same seed gives the same faults."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.launch.placement.resources import sharing_a_host
from asyncrl.success import wilson

KINDS = {
    "actor": "killed",
    "learner": "killed",
    "buffer": "killed",
    "weights": "killed",
    "scorer": "killed",
    "stop": "halted",
    "node": "lost with its host",
    "env": "of every episode under way lost",
    "net": "cut, silent or slow",
    "disk-full": "full",
    "disk-slow": "slow",
    "clock": "off",
}
"""Kinds of faults, and what each does to its target."""
PROCESSES = ("actor", "learner", "buffer", "weights", "scorer", "stop", "node")
LASTS_S = {"stop": (1.0, 15.0), "net": (1.0, 30.0), "disk-full": (1.0, 8.0), "disk-slow": (2.0, 20.0)}
"""Range of the duration of faults that pass, drawn log-uniformly. Past 20 s the peers give up a cut connection."""
NET = ("cut", "silent", "slow")
"""cut: connections are closed and refused. silent: nothing passes, as when a cable is pulled. slow: data arrive late,
sometimes as late as after a lost packet."""
CLOCK_S = 3600.0
"""Largest offset of a clock from the true time, in either direction."""
LISTENERS = ("buffer", "weights", "launcher")


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """Seconds since the first training step."""
    kind: str
    target: str
    """A role; for `node` the roles that share the host, joined by +; otherwise a description."""
    for_s: float = 0.0
    """Duration; 0: the fault does not pass."""
    mode: str = ""
    """net: one of NET."""
    offset_s: float = 0.0
    """clock: offset from the true time."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose processes are the target, if any."""
        return tuple(self.target.split("+")) if self.kind in PROCESSES else ()

    def __str__(self) -> str:
        what = {"net": self.mode, "clock": f"{self.offset_s:+.0f} s off"}.get(self.kind, KINDS[self.kind])
        return f"{self.target} {what}{f' for {self.for_s:.1f} s' if self.for_s else ''}"


def targets(kind: str, roles: Sequence[str]) -> list[str]:
    """The possible targets of a fault of this kind, in a run of these roles."""
    match kind:
        case "stop":
            return list(roles)
        case "node":
            return ["+".join(group) for group in sharing_a_host(roles)]
        case "net":
            return [f"connections to {name}" for name in LISTENERS if name in (*roles, "launcher")]
        case "env":
            return ["environment"]
        case "disk-full" | "disk-slow":
            return ["disk"]
        case "clock":
            return ["clock"]
        case _:
            return [role for role in roles if role.partition("-")[0] == kind]


def plan(seed: int, kinds: Sequence[str], roles: Sequence[str], every_s: float, for_s: float) -> list[Fault]:
    """One fault per `every_s`, up to a quarter of it early or late. Every kind occurs before one occurs again.

    Raises ConfigError for an unknown kind, for one without a target in the run, and for times that allow no fault.
    """
    rng = random.Random(seed)
    if not 0 < every_s <= for_s:
        raise ConfigError(f"--every is {every_s:g} and --for {for_s:g}: expected --every above 0 and at most --for.")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--kill names {unknown[0]!r}: expected some of {', '.join(KINDS)}.")
    of_kind: Mapping[str, list[str]] = {kind: targets(kind, roles) for kind in kinds}
    for kind, possible in of_kind.items():
        if not possible:
            raise ConfigError(
                f"--kill names {kind!r}, and the run has no such process: it has {', '.join(roles)}. Leave it out."
            )
    faults: list[Fault] = []
    deck: list[str] = []
    while (at := (len(faults) + 1) * every_s) <= for_s:
        if not deck:
            deck = rng.sample(list(kinds), len(kinds))
        kind = deck.pop()
        shift = rng.uniform(-0.25, 0.25) * every_s
        least, most = LASTS_S.get(kind, (0.0, 0.0))
        lasts_s = least * (most / least) ** rng.random() if least else 0.0
        mode = rng.choice(NET) if kind == "net" else ""
        offset_s = rng.uniform(-CLOCK_S, CLOCK_S) if kind == "clock" else 0.0
        faults.append(Fault(at + shift, kind, rng.choice(of_kind[kind]), lasts_s, mode, offset_s))
    return faults


def differs(disturbed: float, undisturbed: float, tasks: int) -> str:
    """How two success rates, each over `tasks` episodes, differ; empty: their 95% intervals overlap.

    >>> differs(0.9, 0.95, 100), differs(0.5, 0.95, 100)
    ('', 'final success 0.500 (0.404 to 0.596), undisturbed 0.950 (0.888 to 0.978)')
    """
    (low, high), (least, most) = wilson(disturbed, tasks), wilson(undisturbed, tasks)
    if high >= least and most >= low:
        return ""
    return (
        f"final success {disturbed:.3f} ({low:.3f} to {high:.3f}), "
        f"undisturbed {undisturbed:.3f} ({least:.3f} to {most:.3f})"
    )
