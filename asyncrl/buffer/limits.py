"""How large the numbers and the size of a message may be in this run. Pure.

client/messages.py and trajectory/ declare for each number what bounds it: a constant, or a name that stands here with
its value from the configuration. So the cost of a message is bounded by its size, and no number of it is a multiplier.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.buffer.client import codec
from asyncrl.buffer.client.messages import (
    MAX_PUTS,
    MAX_SCORED,
    MOST,
    REQUESTS,
    PutRequest,
    Request,
    ScoredRequest,
    TurnRequest,
)
from asyncrl.buffer.rules import Rules
from asyncrl.trajectory import Row, TicketId
from asyncrl.trajectory.turns import RecordedSample
from asyncrl.wire import MAX_HEADER_BYTES, Frame, WireError
from asyncrl.wire.turns import MAX_TURN_BYTES, StoredTurn

_HEADER_BYTES = 64 << 10
"""Most bytes of a header without leases ..."""
_LEASE_BYTES = 64
"""... and for each of these."""
Place = tuple[str | int, ...]
"""Where a number stands: a field, and the places inside it."""

_TOKEN_BYTES = 14
"""Most bytes of one recorded token: id, logprob, version and number of kept ids."""
_KEPT_BYTES = 4
_BESIDE_TOKENS = 4096
"""Most bytes of a recorded sample, beside its tokens."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest value of each number, and the largest number of entries of each list."""

    version: int
    """`learner.steps`, or what the ledger has reached with more, on whatever branch."""
    batch: int
    """Batch numbers: from what the ledger has reached, each step may be preceded by `learner.max_skipped` skipped
    ones."""
    credits: int
    """Tickets that one actor may ask for: its slots, or all that can be issued at once."""
    ranks: int
    """`learner.ranks`."""
    leases: int
    """Leases in one message: the tickets that an actor holds, and those of which it has not learned the end."""
    scoring: int
    """Groups that one scorer may hold, or give back at once."""
    row_tokens: int
    """Tokens of one row: `env.max_tokens`, and one answer that ran over it."""
    kept: int
    """Kept ids of one token: `actors.max_kept`."""
    turn_bytes: int
    """Most bytes of one recorded reset or answer, its snapshot included: `buffer.turn_max_kb`."""

    @classmethod
    def of(cls, rules: Rules, reached: tuple[int, int], eval_tickets: int) -> Limits:
        """`reached`: the largest batch number and version in the ledger (`furthest`)."""
        version = max(rules.steps, reached[1]) + 1
        credits = max(rules.slots, rules.capacity + eval_tickets)
        return cls(
            version=version,
            batch=reached[0] + version * (rules.max_skipped + 1) + 1,
            credits=credits,
            ranks=rules.ranks,
            leases=4 * credits,
            scoring=MAX_SCORED,
            row_tokens=rules.row_tokens,
            kept=rules.max_kept,
            turn_bytes=rules.turn_bytes,
        )

    @property
    def header_bytes(self) -> int:
        return min(MAX_HEADER_BYTES, _HEADER_BYTES + _LEASE_BYTES * self.leases)

    @property
    def frames(self) -> int:
        """Frames of the longest message."""
        return 1 + MAX_PUTS

    def decode(self, message: Sequence[Frame]) -> Request[Any]:
        """The request of a message. Raises WireError."""
        if not message:
            raise WireError("a request has a header frame, got none")
        request = codec.decode_request(message[0], self.header_bytes)
        for place, bound in DECLARED[type(request)]:
            value, most = _at(request, place), getattr(self, bound)
            if value is None:
                continue
            if isinstance(value, (int, float)) and value > most:
                raise WireError(f"{_name(place)} is {value}, expected at most {most} in this run")
            if not isinstance(value, (int, float)) and len(value) > most:
                raise WireError(f"{_name(place)} has {len(value)} entries, expected at most {most} in this run")
        most = self._frames_of(request)
        if len(message) - 1 > most:
            raise WireError(f"{request.op} came with more than {most} frames behind its header")
        return request

    def check_rows(self, rows: Iterable[Row], of: str) -> None:
        """Raises WireError for a row that no episode of this run has, or one with more kept ids. `of`: whose they
        are."""
        for row in rows:
            kept = 0 if row.kept is None else int(row.kept.counts.max(initial=0))
            if kept > self.kept:
                raise WireError(f"a token of {of} has {kept} kept ids, expected at most {self.kept} (actors.max_kept)")
            if len(row) > self.row_tokens:
                raise WireError(
                    f"a row of {of} has {len(row)} tokens, expected at most {self.row_tokens} "
                    "(env.max_tokens + actors.max_new_tokens)"
                )

    @property
    def record_bytes(self) -> int:
        """Most bytes of any recorded turn; the size of a sample is bounded by its number of tokens."""
        sample = self.row_tokens * (_TOKEN_BYTES + _KEPT_BYTES * self.kept) + _BESIDE_TOKENS
        return min(MAX_TURN_BYTES, max(self.turn_bytes, sample))

    def check_turn(self, turn: StoredTurn, id: TicketId) -> None:
        """Raises WireError for a sample that no turn of this run has, and for an answer with too many bytes."""
        record = turn.record
        if not isinstance(record, RecordedSample):
            if turn.size > self.turn_bytes:
                raise WireError(
                    f"{record.named} of ticket {id} has {turn.size} bytes with its snapshot, expected at most "
                    f"{self.turn_bytes}: raise buffer.turn_max_kb, or shorten what the environment gives"
                )
            return
        kept = 0 if record.kept is None else int(record.kept.counts.max(initial=0))
        if kept > self.kept or len(record.token_ids) > self.row_tokens:
            raise WireError(
                f"{record.named} of ticket {id} has {len(record.token_ids)} tokens, of {kept} kept ids at most, "
                f"expected at most {self.row_tokens} (env.max_tokens + actors.max_new_tokens) of {self.kept} "
                "(actors.max_kept)"
            )

    def _frames_of(self, request: Request[Any]) -> int:
        if isinstance(request, PutRequest | TurnRequest):
            return MAX_PUTS
        return 1 if isinstance(request, ScoredRequest) else 0


def _declared(hint: Any, place: Place) -> Iterator[tuple[Place, str]]:
    """Places in a value of this type that name a bound of the run, and its name."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *metas = typing.get_args(hint)
        for meta in metas:
            if isinstance(meta, msgspec.Meta) and meta.extra and MOST in meta.extra:
                yield place, str(meta.extra[MOST])
        yield from _declared(inner, place)
    elif typing.get_origin(hint) is tuple:
        for index, each in enumerate(typing.get_args(hint)):
            yield from _declared(each, (*place, index))
    elif type(None) in typing.get_args(hint):
        for each in typing.get_args(hint):
            yield from _declared(each, place)


def _of_request(request: type[Request[Any]]) -> tuple[tuple[Place, str], ...]:
    hints = typing.get_type_hints(request, include_extras=True)
    return tuple(found for field in request.__struct_fields__ for found in _declared(hints[field], (field,)))


DECLARED = {request: _of_request(request) for request in REQUESTS}


def _at(request: Request[Any], place: Place) -> Any:
    field, *inside = place
    value = getattr(request, str(field))
    for index in inside:
        value = None if value is None else value[index]
    return value


def _name(place: Place) -> str:
    field, *inside = place
    return f"{field}{''.join(f'[{index}]' for index in inside)}"
