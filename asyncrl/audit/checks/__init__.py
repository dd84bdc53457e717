"""The table of checks: what must hold between the witnesses of a run. All checks are pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from asyncrl.audit.checks.accounting import EQUATION, STALENESS, USES, equation, staleness, uses
from asyncrl.audit.checks.announced import ANNOUNCED, announced
from asyncrl.audit.checks.bounds import BOUNDS, bounds
from asyncrl.audit.checks.chain import CHAIN, chain
from asyncrl.audit.checks.drops import DROPS, drops
from asyncrl.audit.checks.evaluations.sets import EVALUATIONS, evaluations
from asyncrl.audit.checks.evaluations.stops import STOPS, stops
from asyncrl.audit.checks.history import HISTORY, history
from asyncrl.audit.checks.lengths import LENGTHS, lengths
from asyncrl.audit.checks.logs import ACKNOWLEDGEMENTS, LEARNER, acknowledgements, learner
from asyncrl.audit.checks.references import ROWS, rows
from asyncrl.audit.checks.replays import REPLAYS, replays
from asyncrl.audit.checks.settings import SETTINGS, settings
from asyncrl.audit.checks.slots import SLOTS, slots
from asyncrl.audit.checks.stored.scores import SCORES, Told, scores
from asyncrl.audit.checks.stored.turns import TURNS, turns
from asyncrl.audit.checks.tasks.curriculum import CURRICULUM, curriculum
from asyncrl.audit.checks.tasks.demonstrations import DEMONSTRATIONS, Shown, demonstrations
from asyncrl.audit.checks.tasks.draws import DRAWS, draws
from asyncrl.audit.payloads import PAYLOADS, payloads
from asyncrl.audit.table import Check, described
from asyncrl.audit.witnesses import Evidence


@dataclass(frozen=True, slots=True)
class Violation:
    check: str
    what: str

    def __str__(self) -> str:
        return f"{self.check}: {self.what}"


CHECKS: dict[str, tuple[tuple[Check, ...], Callable[[Evidence], Iterator[str]]]] = {
    "rows": (ROWS, lambda e: rows(e.ledger)),
    "draws": (DRAWS, lambda e: draws(e.ledger, e.task_of)),
    "demonstrations": (
        DEMONSTRATIONS,
        lambda e: demonstrations(e.ledger, Shown(e.demonstrations, e.bounds.demonstrations_per_step, e.lists)),
    ),
    "curriculum": (CURRICULUM, lambda e: curriculum(e.ledger, e.curriculum)),
    "acknowledgements": (
        ACKNOWLEDGEMENTS,
        lambda e: (text for log in e.acks for text in acknowledgements(e.ledger, log)),
    ),
    "equation": (EQUATION, lambda e: equation(e.ledger)),
    "drops": (DROPS, lambda e: drops(e.ledger, e.rules)),
    "history": (HISTORY, lambda e: history(e.ledger, e.lists, e.published, e.completed)),
    "settings": (SETTINGS, lambda e: settings(e.ledger, e.settings)),
    "uses": (USES, lambda e: uses(e.ledger, e.bounds)),
    "replays": (REPLAYS, lambda e: replays(e.ledger, e.rules)),
    "bounds": (BOUNDS, lambda e: bounds(e.ledger, e.rules)),
    "slots": (SLOTS, lambda e: slots(e.ledger, e.rules)),
    "staleness": (STALENESS, lambda e: staleness(e.ledger, e.bounds)),
    "learner": (LEARNER, lambda e: (text for done in e.lists for text in learner(e.ledger, done))),
    "payloads": (PAYLOADS, lambda e: payloads(e.ledger, e.payload)),
    "scores": (SCORES, lambda e: scores(e.ledger, _told(e))),
    "lengths": (LENGTHS, lambda e: lengths(e.ledger, e.rules)),
    "turns": (TURNS, lambda e: turns(e.ledger, e.payload)),
    "announced": (ANNOUNCED, lambda e: announced(e.ledger, e.acks)),
    "evaluations": (EVALUATIONS, lambda e: evaluations(e.ledger, e.rules, e.held_out)),
    "stops": (STOPS, lambda e: stops(e.ledger, e.rules)),
    "chain": (CHAIN, lambda e: chain(e.ledger, e.snapshots)),
}
"""By name: the checks, and how they are applied to the evidence."""


def _told(e: Evidence) -> Told:
    trained = [done.teacher for each in e.lists for done in each.done if done.teacher]
    return Told(e.bounds.scored, e.payload, e.scorers, e.teacher, trained)


def violations(evidence: Evidence) -> Iterator[Violation]:
    """Every contradiction between the witnesses."""
    for name, (_, apply) in CHECKS.items():
        yield from (Violation(name, text) for text in apply(evidence))


def listed() -> dict[str, list[str]]:
    """What is checked, in sentences, by the name of the check."""
    return {name: described(checks) for name, (checks, _) in CHECKS.items()}
