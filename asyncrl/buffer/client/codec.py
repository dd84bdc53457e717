"""Headers of requests and replies as bytes, checked against their structures, and the frames that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, Union, cast, get_args

import msgspec

from asyncrl.buffer.client.errors import BufferRefused, LedgerRestored
from asyncrl.buffer.client.messages import (
    REQUESTS,
    BatchReply,
    RecordReply,
    Refusal,
    ReplyHeader,
    Request,
    ScoringReply,
    TicketReply,
)
from asyncrl.buffer.record import from_record
from asyncrl.trajectory import Count, Ticket
from asyncrl.wire import MAX_HEADER_BYTES, Frame, WireError
from asyncrl.wire.teacher_scores import from_record as scores_from_record
from asyncrl.wire.turns import decode_carried, encode_carried

T = TypeVar("T")

_MAX_REPLY_BYTES = 1 << 30
"""Size of a reply's header: tickets bring their tasks, of any size."""


class _Numbered(msgspec.Struct, frozen=True):
    n: Count


_encode = msgspec.msgpack.Encoder().encode
_REQUESTS: msgspec.msgpack.Decoder[Request[Any]] = msgspec.msgpack.Decoder(Union[REQUESTS])  # noqa: UP007 - of a tuple
_NUMBERED = msgspec.msgpack.Decoder(_Numbered)
_HEADERS = msgspec.msgpack.Decoder(ReplyHeader)
_REPLIES = {r: msgspec.msgpack.Decoder(get_args(r.__orig_bases__[0])[0]) for r in REQUESTS}  # type: ignore[attr-defined]


def encode_request(request: Request[Any], n: int) -> bytes:
    return _encode(msgspec.structs.replace(request, n=n))


def decode_request(header: Frame, max_bytes: int = MAX_HEADER_BYTES) -> Request[Any]:
    """Raises WireError."""
    request = _decoded(_REQUESTS, header, max_bytes)
    if request.n < 0:
        raise WireError("n is missing, expected an integer >= 0")
    return request


def number_of(header: Frame) -> int:
    """The number of a request that cannot be decoded; -1 if it has none."""
    try:
        return _decoded(_NUMBERED, header, MAX_HEADER_BYTES).n
    except WireError:
        return -1


def encode_reply(n: int, reply: Any) -> bytes:
    return _encode(ReplyHeader(n, msgspec.Raw(_encode(reply))))


def encode_refusal(n: int, code: str, message: str) -> bytes:
    return _encode(ReplyHeader(n, error=Refusal(code, message)))


def decode_header(header: Frame) -> ReplyHeader:
    """Raises WireError."""
    return _decoded(_HEADERS, header, _MAX_REPLY_BYTES)


def decode_reply(request: Request[T], header: ReplyHeader, frames: Sequence[Frame]) -> T:
    """Raises BufferRefused, LedgerRestored, WireError."""
    if header.error is not None:
        if header.error.code == "ledger_restored":
            raise LedgerRestored(header.error.message)
        raise BufferRefused(request.op, header.error.code, header.error.message)
    reply: Any = _decoded(_REPLIES[type(request)], header.reply, _MAX_REPLY_BYTES)
    if isinstance(reply, TicketReply):
        reply = _with_carried(reply, frames)
    elif isinstance(reply, RecordReply) and frames:
        reply = RecordReply(from_record(frames[0]))
    elif isinstance(reply, BatchReply):
        reply = _with_frames(reply, frames)
    elif isinstance(reply, ScoringReply):
        reply = _with_trajectories(reply, frames)
    return cast(T, reply)


def _decoded(decoder: msgspec.msgpack.Decoder[T], header: Frame | msgspec.Raw, max_bytes: int) -> T:
    size = len(memoryview(header))
    if size > max_bytes:
        raise WireError(f"header has {size} bytes, at most {max_bytes} are read")
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"header cannot be read: {error}") from error


# Recorded turns, beside tickets


def ticket_reply(
    tickets: Sequence[Ticket], why: str, hold: tuple[int, int] | None = None, slots: int | None = None
) -> tuple[TicketReply, list[Frame]]:
    """A reply with its frames."""
    turns = [(place, len(ticket.turns)) for place, ticket in enumerate(tickets) if ticket.turns]
    frames: list[Frame] = [encode_carried(record) for ticket in tickets for record in ticket.turns]
    bare = [replace(ticket, turns=()) if ticket.turns else ticket for ticket in tickets]
    return TicketReply(bare, why, hold, turns, slots), frames


def _with_frames(reply: BatchReply, frames: Sequence[Frame]) -> BatchReply:
    """The reply with its trajectories, the chats of its demonstrations, and the scores, in this order."""
    of_each = len(reply.digests), len(reply.demonstrations), len(reply.score_digests)
    if len(frames) != sum(of_each):
        raise WireError(
            f"{len(frames)} frames came for {of_each[0]} trajectories, {of_each[1]} demonstrations and the scores of "
            f"{of_each[2]} groups"
        )
    records, rest = frames[: of_each[0]], frames[of_each[0] :]
    chats, scores = [bytes(frame) for frame in rest[: of_each[1]]], rest[of_each[1] :]
    return replace(
        reply,
        trajectories=[from_record(record) for record in records],
        demonstrations=tuple(replace(d, chat=c) for d, c in zip(reply.demonstrations, chats, strict=True)),
        scores=[scores_from_record(record) for record in scores],
    )


def _with_trajectories(reply: ScoringReply, frames: Sequence[Frame]) -> ScoringReply:
    if len(frames) != sum(len(lease.digests) for lease in reply.groups):
        raise WireError(f"{len(frames)} frames came for the trajectories of {len(reply.groups)} groups")
    return replace(reply, trajectories=[from_record(record) for record in frames])


def _with_carried(reply: TicketReply, records: Sequence[Frame]) -> TicketReply:
    """The reply with the recorded turns of its tickets."""
    tickets = list(reply.tickets)
    if len(records) != sum(count for _, count in reply.turns):
        raise WireError(f"{len(records)} recorded turns came, turns counts {[*reply.turns]}")
    if len({place for place, _ in reply.turns if place < len(tickets)}) != len(reply.turns):
        raise WireError(f"turns is {[*reply.turns]}, expected different places below {len(tickets)}")
    begins = 0
    for place, count in reply.turns:
        carried = tuple(map(decode_carried, records[begins : begins + count]))
        tickets[place] = replace(tickets[place], turns=carried)
        begins += count
    return replace(reply, tickets=tickets, turns=())
