"""Which fault comes when, and what they must not have changed. Pure: the same seed gives the same faults."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.errors import ConfigError
from asyncrl.evaluation import wilson

KINDS = ("actor", "learner", "buffer", "weights", "stop")
"""Processes to kill dead; `stop`: any of them halted for a while, as by a swapping host (SIGSTOP, then SIGCONT)."""
STOP_S = (1.0, 15.0)
"""How long a process is halted; log-uniform."""


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """Since the first training step."""
    role: str
    stop_s: float = 0.0
    """0: killed dead."""

    def __str__(self) -> str:
        return f"{self.role} {f'halted for {self.stop_s:.1f} s' if self.stop_s else 'killed'}"


def plan(seed: int, kinds: Sequence[str], roles: Sequence[str], every_s: float, for_s: float) -> list[Fault]:
    """One fault per `every_s`, up to a quarter of it early or late. Every kind comes up before one comes again.

    Raises ConfigError for a kind of which the run has no role.
    """
    rng = random.Random(seed)
    of_kind = {kind: [r for r in roles if kind in ("stop", r.partition("-")[0])] for kind in kinds}
    for kind, found in of_kind.items():
        if not found:
            raise ConfigError(
                f"--kill names {kind!r}, and the run has no such process: expected some of {', '.join(KINDS)}; it has "
                f"{', '.join(roles)}."
            )
    faults: list[Fault] = []
    hand: list[str] = []
    while (at := (len(faults) + 1) * every_s) <= for_s:
        if not hand:
            hand = rng.sample(list(kinds), len(kinds))
        kind = hand.pop()
        shift = rng.uniform(-0.25, 0.25) * every_s
        stop_s = STOP_S[0] * (STOP_S[1] / STOP_S[0]) ** rng.random() if kind == "stop" else 0.0
        faults.append(Fault(at + shift, rng.choice(of_kind[kind]), stop_s))
    return faults


def differs(disturbed: float, undisturbed: float, tasks: int) -> str:
    """Why two shares of success, each of `tasks` episodes, are not equal; empty: their 95% intervals meet.

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
