"""A bound and slots that the ends of batches decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.buffer.bounds.automatic import Auto
from asyncrl.buffer.bounds.slots import SlotLimits
from asyncrl.buffer.client.messages import Told
from tests.audit.simulated import Simulated
from tests.buffer.fakes import RULES


def automatic(folder: Path) -> Simulated:
    """The bound was raised, lowered while groups waited that were admitted before, and left for a branch."""
    run = Simulated(folder, auto=Auto(0, 4, 1), max_staleness=4)

    def rounds(count: int, ess: float) -> None:
        run.told = Told(0.5, ess, 1e-3)
        for _ in range(count):
            for ticket in run.issue(20):
                run.put(ticket)
            run.now += 1.0
            run.step()

    rounds(4, 1.0)
    run.checkpoint()
    rounds(2, 0.5)
    run.kill()
    rounds(2, 0.5)
    run.fork(4, 4)
    rounds(4, 0.6)
    run.checkpoint()
    run.kill()
    rounds(4, 1.0)
    run.checkpoint()
    return run


def tuned(folder: Path) -> Simulated:
    """The slots were raised, and stayed over deaths of the buffer and a branch; a ticket was given back late."""
    run = Simulated(folder, auto=Auto(2, 4, 1), max_staleness=4, tuning=SlotLimits(1, 12, 3))

    def fill() -> None:
        while len(waiting(run)) < RULES["groups_per_step"]:
            tickets = run.issue(20)
            assert tickets, "nothing is admitted, and a batch is not full"
            for ticket in tickets:
                run.put(ticket)

    def rounds(count: int, waited: float) -> None:
        run.told = Told(waited, 1.0, 1e-3, 2.0)
        for _ in range(count):
            fill()
            run.now += 1.0
            run.step()

    rounds(3, 0.6)
    run.checkpoint()
    rounds(2, 0.6)
    run.kill()
    rounds(2, 0.1)
    run.fork(3, 3)
    rounds(6, 0.0)
    fill()
    lent = run.issue(20)
    rounds(1, 0.0)
    run.buffer.release("actor-0", [(lent[0].id, 0)])
    for ticket in lent[1:]:
        run.put(ticket)
    run.checkpoint()
    run.kill()
    rounds(6, 0.0)
    run.checkpoint()
    return run


def waiting(run: Simulated) -> list[Any]:
    return [group for group in run.buffer.ledger.live.values() if group.state == "waiting"]
