"""The prefixes that interrupted attempts handed back: each is where the ledger says, byte for byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from asyncrl.audit.ledger import LedgerRows, PrefixRow
from asyncrl.audit.payloads import PayloadDiffers, ReadPayload, decoded
from asyncrl.audit.table import Check, apply

_PUT = ("stored", "late", "lost")
"""An attempt that was handed back may still be put by an actor that did not stop."""


def prefixes(ledger: LedgerRows, read: ReadPayload) -> Iterator[str]:
    return apply(PREFIXES, ledger, read)


def handed_back_attempts_have_prefixes(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """Every attempt that was handed back has its prefix in the ledger."""
    handed_back = {key for key, ended in _ended(ledger).items() if ended == "handed_back"}
    for number, index, attempt in sorted(handed_back - {(p.group, p.index, p.attempt) for p in ledger.prefixes}):
        yield f"attempt {attempt} at trajectory {ledger.name(number, index)} was handed back, and its prefix is missing"


def prefixes_have_attempts(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """Every prefix is of an attempt that was handed back."""
    ended = _ended(ledger)
    for p in ledger.prefixes:
        if ended.get((p.group, p.index, p.attempt)) not in ("handed_back", *_PUT):
            yield f"{_name(ledger, p)} is recorded, and no such attempt was handed back"


def kept_prefixes_are_of_open_tickets(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """A prefix that is kept is the only one of a ticket that is still open."""
    kept: Counter[tuple[int, int]] = Counter()
    for p in (p for p in ledger.prefixes if p.ended is None):
        key, group = (p.group, p.index), ledger.groups.get(p.group)
        kept[key] += 1
        if group is None or group.state != "in_flight" or key in ledger.trajectories or kept[key] > 1:
            yield f"{_name(ledger, p)} is kept, and its ticket is not open or has another one"


def continued_prefixes_are_stored(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """A trajectory of the attempt that was continued, or of a later one, is stored."""
    for p in _continued(ledger):
        row = ledger.trajectories.get((p.group, p.index))
        if row is None or row.attempt < p.attempt:
            yield f"{_name(ledger, p)} was continued, and neither its attempt nor a later one is stored"


def continuations_begin_with_the_prefix(ledger: LedgerRows, read: ReadPayload) -> Iterator[str]:
    """What continued a prefix begins with its tokens, byte for byte."""
    for p in _continued(ledger):
        row, group = ledger.trajectories.get((p.group, p.index)), ledger.groups.get(p.group)
        if row is None or row.attempt < p.attempt or group is None or not group.payload:
            continue
        try:
            first = decoded(group, row, read).rows[0]
        except PayloadDiffers:
            continue  # reported by `payloads`
        if first.first(p.tokens).digest() != p.digest:
            yield f"{_name(ledger, p)} was continued, and what is stored does not begin with it"


def replaced_prefixes_have_longer_ones(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """A prefix that was replaced by a longer one has that longer one in the ledger."""
    for p in ledger.prefixes:
        if p.ended == "longer" and not any(_after(q, p) for q in ledger.prefixes):
            yield f"{_name(ledger, p)} gave way to a longer one, which is missing"


def prefixes_are_of_their_branch(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """No prefix that went on behind the beginning of a branch has a version that the branch did not have."""
    for p in ledger.prefixes:
        lent, until = ledger.lent_on(p.group, p.index, p.attempt), _went_on_until(ledger, p)
        if lent is not None and until is not None and ledger.left_behind(p.newest, lent, until) is not None:
            yield f"{_name(ledger, p)} has a token of version {p.newest}, and went on on a branch without it"


def _went_on_until(ledger: LedgerRows, p: PrefixRow) -> int | None:
    """The last branch on which a prefix was; None: it went nowhere, or what it went into was lost."""
    if p.ended is None:
        return max(ledger.branches, default=0)
    if p.ended == "longer":
        q = min((q for q in ledger.prefixes if _after(q, p)), key=lambda q: q.attempt, default=None)
        return None if q is None else ledger.lent_on(q.group, q.index, q.attempt)
    row = ledger.trajectories.get((p.group, p.index))
    return row.branch if row is not None and _is_continued(ledger, p) else None


def _name(ledger: LedgerRows, p: PrefixRow) -> str:
    return f"the prefix of attempt {p.attempt} at trajectory {ledger.name(p.group, p.index)}"


def _ended(ledger: LedgerRows) -> dict[tuple[int, int, int], str | None]:
    """How each attempt ended."""
    return {(a.group, a.index, a.attempt): a.ended for attempts in ledger.attempts.values() for a in attempts}


def _continued(ledger: LedgerRows) -> Iterator[PrefixRow]:
    return (p for p in ledger.prefixes if _is_continued(ledger, p))


def _is_continued(ledger: LedgerRows, p: PrefixRow) -> bool:
    """Whether a prefix was continued, and the disk has not lost what continued it."""
    own = (a for a in ledger.attempts.get((p.group, p.index), ()) if a.attempt >= p.attempt)
    return p.ended == "continued" and not any(a.ended == "lost" for a in own)


def _after(q: PrefixRow, p: PrefixRow) -> bool:
    return (q.group, q.index) == (p.group, p.index) and q.attempt > p.attempt and q.tokens >= p.tokens


PREFIXES: tuple[Check, ...] = (
    handed_back_attempts_have_prefixes,
    prefixes_have_attempts,
    kept_prefixes_are_of_open_tickets,
    continued_prefixes_are_stored,
    continuations_begin_with_the_prefix,
    replaced_prefixes_have_longer_ones,
    prefixes_are_of_their_branch,
)
