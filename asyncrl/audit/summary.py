"""The numbers that the audit prints with its verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from asyncrl.audit.checks.logs import loss, turn_was_lost
from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.witnesses import Evidence
from asyncrl.buffer.ledger.drop_bias import Fate, Tally

STATES = ("in_flight", "waiting", "assigned", "trained")


@dataclass(frozen=True, slots=True)
class Figures:
    witnesses: dict[str, int]
    """How many records each witness has."""
    equation: dict[str, dict[str, int]]
    """By branch: issued, every state, `dropped: reason`."""
    uses: dict[str, int]
    """Groups by how often they were used in applied batches."""
    outcomes: dict[str, int]
    """Batches of the line by outcome."""
    staleness: dict[str, int]
    """Uses in applied batches by the group's staleness."""
    bounds: dict[str, int]
    """Batches of the line by their bound on staleness, if it was chosen automatically."""
    slots: dict[str, int]
    """Batches of the line by the slots of each actor that they decided, if these were tuned."""
    attempts: dict[str, int]
    """Attempts by how they ended."""
    turns: dict[str, int]
    """Recorded samples and answers, by how they ended."""
    puts: dict[str, int]
    """Puts that were duplicate or late, as the buffer counted them."""
    lost: dict[str, int]
    """Acknowledged trajectories that were lost with a host or a disk, as the failure model allows."""
    lost_turns: list[str]
    """Recorded turns that were lost with a host, outside of the equation: their episodes went on before them."""
    unlogged: int
    """Stored trajectories in no actor's log: the actor was killed before it wrote the line."""
    bias: dict[str, dict[str, Any]]
    """Count, mean length, turns and reward, and environments of trajectories generated, trained, dropped."""


def figures(evidence: Evidence) -> Figures:
    ledger = evidence.ledger
    line = [batch for batch in ledger.line if batch.outcome == "applied"]
    acks = [ack for log in evidence.acks for ack in log.acks]
    named = {(ack.group, ack.index) for ack in acks}
    kept = sum(len(ledger.members.get(g.number, ())) for g in ledger.groups.values() if g.payload)
    return Figures(
        witnesses={
            "groups": len(ledger.groups),
            "trajectories": len(ledger.trajectories),
            "batches": len(ledger.line),
            "draws": ledger.next_draw,
            "demonstrations": sum(len(ledger.demonstrations.get(batch.serial, ())) for batch in ledger.line),
            "demonstration_rows": 0 if evidence.demonstrations is None else evidence.demonstrations.size,
            "actors": len(evidence.acks),
            "acknowledgements": len(acks),
            "acknowledged_turns": sum(len(log.turns) for log in evidence.acks),
            "checkpoints": len(evidence.lists),
            "listed_batches": max((len(each.done) for each in evidence.lists), default=0),
            "payloads_kept": kept,
            "payloads_reclaimed": len(ledger.trajectories) - kept,
        },
        equation={str(branch): account(ledger, branch) for branch in ledger.branches},
        uses=_counted(g.uses for g in ledger.groups.values()),
        outcomes=_counted(batch.outcome or "open" for batch in ledger.line),
        staleness=_counted(
            batch.version - min(row.oldest for row in members)
            for batch in line
            for number in batch.groups
            if (members := ledger.members.get(number))
        ),
        slots=_counted(batch.tuned.slots for batch in ledger.line if batch.tuned is not None),
        bounds=_counted(batch.bound for batch in ledger.line) if any(b.decision for b in ledger.line) else {},
        attempts=_counted(a.ended or "leased" for attempts in ledger.attempts.values() for a in attempts),
        turns=_counted(row["ended"] or "kept" for row in ledger.tables["turns"]),
        puts={
            name: sum(n for (_, what), n in ledger.counters.items() if what == name) for name in ("duplicate", "late")
        },
        lost={"host": 0, "disk": 0} | _counted(fate for ack in acks if (fate := loss(ledger, ack))),
        lost_turns=[str(line) for log in evidence.acks for line in log.turns if turn_was_lost(ledger, line)],
        unlogged=sum(key not in named for key in ledger.trajectories),
        bias=bias(ledger),
    )


def account(ledger: LedgerRows, branch: int) -> dict[str, int]:
    """One branch's equation: issued, and every state; dropped groups as `dropped: reason`."""
    groups = [g for g in ledger.groups.values() if g.branch == branch]
    counts = Counter(g.state if g.reason is None else f"{g.state}: {g.reason}" for g in groups)
    return {"issued": len(groups)} | {state: counts.pop(state, 0) for state in STATES} | dict(sorted(counts.items()))


def bias(ledger: LedgerRows) -> dict[str, dict[str, Any]]:
    fates: dict[Fate, Tally] = {"generated": Tally(), "trained": Tally(), "dropped": Tally()}
    for (number, _), row in ledger.trajectories.items():
        state = ledger.groups[number].state if number in ledger.groups else ""
        sums = (row.env, 1, row.policy_tokens, row.turns, row.reward)
        fates["generated"].add(*sums)
        if state == "trained":
            fates["trained"].add(*sums)
        elif state == "dropped":
            fates["dropped"].add(*sums)
    return {fate: _means(tally) for fate, tally in fates.items()}


def _means(tally: Tally) -> dict[str, Any]:
    n = max(1, tally.count)
    means = {"length": tally.tokens / n, "turns": tally.turns / n, "reward": tally.reward / n}
    return {"count": tally.count, **means, "environments": dict(sorted(tally.envs.items()))}


def _counted(values: Any) -> dict[str, int]:
    return {str(value): n for value, n in sorted(Counter(values).items())}
