"""What interrupted attempts handed back: each of these prefixes is where the ledger says, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from asyncrl.audit.ledger import LedgerRows, PrefixRow, TrajectoryRow
from asyncrl.audit.payloads import PayloadDiffers, decoded
from asyncrl.trajectory import Row

_PUT = ("stored", "late", "lost")
"""An attempt that was handed back may be put all the same, by an actor that went on."""


def prefixes(ledger: LedgerRows, read: Callable[[TrajectoryRow], bytes]) -> Iterator[str]:
    """A sentence for each contradiction. `read`: the bytes of a payload."""
    ended = {(a.group, a.index, a.attempt): a.ended for rows in ledger.attempts.values() for a in rows}
    named = {(p.group, p.index, p.attempt) for p in ledger.prefixes}
    for number, index, attempt in sorted(
        key for key, how in ended.items() if how == "handed_back" and key not in named
    ):
        yield f"attempt {attempt} at trajectory {ledger.name(number, index)} was handed back, and its prefix is missing"
    kept: set[tuple[int, int]] = set()
    for p in ledger.prefixes:
        whose = f"the prefix of attempt {p.attempt} at trajectory {ledger.name(p.group, p.index)}"
        if ended.get((p.group, p.index, p.attempt)) not in ("handed_back", *_PUT):
            yield f"{whose} is recorded, and no such attempt was handed back"
        row, group = ledger.trajectories.get((p.group, p.index)), ledger.groups.get(p.group)
        if p.ended is None:
            if group is None or group.state != "in_flight" or row is not None or (p.group, p.index) in kept:
                yield f"{whose} is kept, and its ticket is not open or has another one"
            kept.add((p.group, p.index))
        elif p.ended == "continued" and not _lost(ledger, p):
            if row is None or row.attempt < p.attempt:
                yield f"{whose} was continued, and neither its attempt nor a later one is stored"
            elif group is not None and group.payload:
                try:
                    first = decoded(group, row, read).rows[0]
                except PayloadDiffers:
                    continue  # said by `payloads`
                if _beginning(first, p.tokens).digest() != p.digest:
                    yield f"{whose} was continued, and what is stored does not begin with it"
        elif p.ended == "longer" and not any(_after(q, p) for q in ledger.prefixes):
            yield f"{whose} gave way to a longer one, which is missing"


def _lost(ledger: LedgerRows, p: PrefixRow) -> bool:
    """The disk lost the trajectory that continued it."""
    return any(a.ended == "lost" and a.attempt > p.attempt for a in ledger.attempts.get((p.group, p.index), ()))


def _after(q: PrefixRow, p: PrefixRow) -> bool:
    return (q.group, q.index) == (p.group, p.index) and q.attempt > p.attempt and q.tokens >= p.tokens


def _beginning(row: Row, tokens: int) -> Row:
    return replace(
        row,
        token_ids=row.token_ids[:tokens],
        mask=row.mask[:tokens],
        logprobs=row.logprobs[:tokens],
        versions=row.versions[:tokens],
    )
