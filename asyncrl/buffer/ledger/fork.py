"""A fork of history: the new branch keeps every group that it could have produced itself."""

from __future__ import annotations

from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.replays import retire


def fork(ledger: Ledger, b: int, version: int, why: str) -> None:
    """Begins a new branch at batch b. Groups that it could not have produced are dropped and drawn again: those with a
    stored token that is later than its first version. The others go on, complete or not."""
    for batch in ledger.history.fork(b, version, why):
        for number in batch.groups:
            ledger.undo_use(number, batch.outcome)
            _drop_without_payload(ledger, number)
    ledger.live = dict(sorted(ledger.live.items()))
    for group in list(ledger.live.values()):
        if (group.newest or 0) > version:
            ledger.drop(group, "discarded_branch", put_back=True)


def _drop_without_payload(ledger: Ledger, number: int) -> None:
    """A group whose arrays are gone cannot wait again."""
    if ledger.has_payload(number):
        return
    group = ledger.live[number]
    if group.uses:
        retire(ledger, group, "no_payload")
    else:
        ledger.drop(group, "discarded_branch", put_back=True)
