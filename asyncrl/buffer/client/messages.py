"""What travels between the buffer and its clients.

A request is [header, *buffers], header {"op", "n": number, "who": identity, ...}; its reply is [{"n", "ok": true, ...},
*buffers] or [{"n", "ok": false, "error": {"code", "message"}}]. A put and a batch carry one record per trajectory.
Every request may be sent again: the buffer answers a repeat as it answered the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from asyncrl.buffer.batches import BatchState, Start
from asyncrl.buffer.evaluation import EvalReply, EvalResult
from asyncrl.buffer.ledger.group import Outcome
from asyncrl.buffer.record import from_record, to_record
from asyncrl.trajectory import Row, Ticket, TicketId, Trajectory
from asyncrl.wire import Frame, WireError, decode_prefixes, decode_ticket, encode_row, encode_ticket, ticket_id

T = TypeVar("T")
PutOutcome = Literal["stored", "duplicate", "late"]
Held = Sequence[tuple[TicketId, int]]
MAX_LIST = 1 << 20
MAX_PUTS = 64
"""In one request."""


@dataclass(frozen=True, slots=True)
class TicketReply:
    tickets: list[Ticket]
    why: str
    """With fewer tickets than credits: what the buffer is waiting for."""


@dataclass(frozen=True, slots=True)
class BatchReply:
    state: BatchState
    """ready; waiting: ask again; skipped: go on with b + 1; ended: there will be no batch b."""
    why: str
    trajectories: list[Trajectory]
    """This rank's share, group by group."""
    weights: tuple[float, ...]
    """Of each trajectory: 0 when a filter would have dropped its group; it is trained with advantage 0."""
    digests: tuple[str, ...]
    """Of each trajectory."""
    groups: tuple[int, ...]
    """Of the whole batch, in training order."""
    version: int
    """The learner's version that the batch is trained on."""
    branch: int
    """The branch now: weights are published under it."""
    mask_before: int | None
    """Tokens of an older version carry no loss (`over_age: mask`)."""
    checkpoint: bool
    """The disk fills up: write a checkpoint soon, so that payloads can be released."""
    failed: bool
    """Of ended: the run cannot go on, exit code 1."""


@dataclass(frozen=True, slots=True)
class Error:
    """Why one of several puts was refused."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    op: str
    arguments: Mapping[str, Any]
    decode: Callable[[Mapping[str, Any], Sequence[Frame]], T]
    """Of the reply's header and buffers."""
    buffers: Sequence[Frame] = ()
    wait_s: float = 0.0
    """How long the buffer may hold it."""


def _nothing(header: Mapping[str, Any], buffers: Sequence[Frame]) -> None:
    return None


def hello(role: str) -> Request[dict[str, Any]]:
    return Request("hello", {"role": role}, lambda header, _: dict(header["about"]))


def tickets(actor: str, held: tuple[int, int], credits: int, leased: Held, wait_s: float) -> Request[TicketReply]:
    def decode(header: Mapping[str, Any], buffers: Sequence[Frame]) -> TicketReply:
        lent = [decode_ticket(t) for t in header["tickets"]]
        for place, prefix in prefixes(header, buffers, len(lent)).items():
            lent[place] = replace(lent[place], prefix=prefix)
        return TicketReply(lent, header["why"])

    arguments = {"actor": actor, "held": list(held), "credits": credits, "leased": _plain(leased), "wait_s": wait_s}
    return Request("tickets", arguments, decode, wait_s=wait_s)


def renew(actor: str, leases: Held) -> Request[list[tuple[TicketId, int]]]:
    def decode(header: Mapping[str, Any], _: Sequence[Frame]) -> list[tuple[TicketId, int]]:
        return held(header, "revoked")

    return Request("renew", {"actor": actor, "leases": _plain(leases)}, decode)


def put(trajectories: Sequence[Trajectory]) -> Request[list[PutOutcome | Error]]:
    """Several at once cost the buffer less than one by one; each has an outcome of its own."""

    def decode(header: Mapping[str, Any], _: Sequence[Frame]) -> list[PutOutcome | Error]:
        return [Error(**outcome) if isinstance(outcome, dict) else outcome for outcome in header["outcomes"]]

    return Request("put", {}, decode, [to_record(t) for t in trajectories])


def fail(id: TicketId, attempt: int, reason: str, detail: str) -> Request[None]:
    arguments = {"id": _id(id), "attempt": attempt, "reason": reason[:200], "detail": detail[:2000]}
    return Request("fail", arguments, _nothing)


def release(actor: str, leases: Held, prefixes: Sequence[Row | None] = ()) -> Request[None]:
    places, buffers = _encode_prefixes(prefixes)
    arguments = {"actor": actor, "leases": _plain(leases), "prefixes": places}
    return Request("release", arguments, _nothing, buffers)


def start(resume_batch: int, version: int, branch: int | None, fresh: bool, caused: bool) -> Request[Start]:
    names = ("incarnation", "branch", "batch", "version", "published")
    arguments = {"batch": resume_batch, "version": version, "branch": branch, "fresh": fresh, "caused": caused}
    return Request("start", arguments, lambda header, _: Start(*(header[name] for name in names)))


def batch(incarnation: int, b: int, dp_rank: int, dp_size: int, wait_s: float) -> Request[BatchReply]:
    def decode(header: Mapping[str, Any], buffers: Sequence[Frame]) -> BatchReply:
        return BatchReply(
            state=header["state"],
            why=header["why"],
            trajectories=[from_record(record) for record in buffers],
            weights=tuple(header["weights"]),
            digests=tuple(header["digests"]),
            groups=tuple(header["groups"]),
            version=header["version"],
            branch=header["branch"],
            mask_before=header["mask_before"],
            checkpoint=header["checkpoint"],
            failed=header["failed"],
        )

    arguments = {"incarnation": incarnation, "b": b, "dp_rank": dp_rank, "dp_size": dp_size, "wait_s": wait_s}
    return Request("batch", arguments, decode, wait_s=wait_s)


def finished(incarnation: int, b: int, outcome: Outcome) -> Request[int]:
    arguments = {"incarnation": incarnation, "b": b, "outcome": outcome}
    return Request("finished", arguments, lambda header, _: int(header["version"]))


def published(incarnation: int, branch: int, version: int, digest: str) -> Request[None]:
    arguments = {"incarnation": incarnation, "branch": branch, "version": version, "digest": digest}
    return Request("published", arguments, _nothing)


def checkpointed(incarnation: int, version: int, batch: int, path: str) -> Request[None]:
    arguments = {"incarnation": incarnation, "version": version, "batch": batch, "path": path}
    return Request("checkpointed", arguments, _nothing)


def evaluate(version: tuple[int, int], label: str) -> Request[None]:
    return Request("evaluate", {"version": list(version), "label": label}, _nothing)


def evaluation(label: str) -> Request[EvalReply]:
    def decode(header: Mapping[str, Any], _: Sequence[Frame]) -> EvalReply:
        results = [EvalResult(t, g, r, rs, (v[0], v[1])) for t, g, r, rs, v in header["results"]]
        return EvalReply(header["done"], header["finished"], header["total"], results, header["why"])

    return Request("evaluation", {"label": label}, decode)


def status() -> Request[dict[str, Any]]:
    return Request("status", {}, lambda header, _: dict(header["status"]))


def caused() -> Request[None]:
    return Request("caused", {}, _nothing)


def stop() -> Request[None]:
    return Request("stop", {}, _nothing)


def encode_tickets(lent: Sequence[Ticket], why: str) -> tuple[dict[str, Any], list[Frame]]:
    """Header and buffers."""
    places, buffers = _encode_prefixes([t.prefix for t in lent])
    return {"tickets": [encode_ticket(t) for t in lent], "why": why, "prefixes": places}, buffers


def encode_evaluation(reply: EvalReply) -> dict[str, Any]:
    results = [[r.task_id, r.greedy, r.reward, dict(r.rewards), list(r.version)] for r in reply.results]
    return {"done": reply.done, "finished": reply.finished, "total": reply.total, "results": results, "why": reply.why}


# What a header must hold. All raise WireError.


def integer(header: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = header.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise WireError(f"{name} is {value!r}, expected an integer >= {least}")
    return value


def seconds(header: Mapping[str, Any], name: str) -> float:
    value = header.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise WireError(f"{name} is {value!r}, expected seconds >= 0")
    return float(value)


def text(header: Mapping[str, Any], name: str, longest: int = 4096) -> str:
    value = header.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise WireError(f"{name} is not a text of at most {longest} characters")
    return value


def flag(header: Mapping[str, Any], name: str) -> bool:
    value = header.get(name, False)
    if not isinstance(value, bool):
        raise WireError(f"{name} is {value!r}, expected true or false")
    return value


def pair(header: Mapping[str, Any], name: str) -> tuple[int, int]:
    """(branch, version); an actor without weights says (-1, -1)."""
    value = header.get(name)
    if not isinstance(value, list) or len(value) != 2:
        raise WireError(f"{name} is {value!r}, expected [branch, version]")
    parts = {"branch": value[0], "version": value[1]}
    return integer(parts, "branch", -1), integer(parts, "version", -1)


def held(header: Mapping[str, Any], name: str) -> list[tuple[TicketId, int]]:
    value = header.get(name)
    if not isinstance(value, list) or len(value) > MAX_LIST:
        raise WireError(f"{name} is not a list of [ticket, attempt]")
    found = []
    for entry in value:
        if not isinstance(entry, list) or len(entry) != 2:
            raise WireError(f"{name} holds {entry!r}, expected [ticket, attempt]")
        found.append((ticket_id(entry[0]), integer({"attempt": entry[1]}, "attempt")))
    return found


def prefixes(header: Mapping[str, Any], buffers: Sequence[Frame], count: int) -> dict[int, Row]:
    """Of some of `count` tickets or leases, by their place."""
    places = header.get("prefixes", [])
    if not isinstance(places, list) or not all(isinstance(p, int) and 0 <= p < count for p in places):
        raise WireError(f"prefixes is {places!r}, expected places below {count}")
    found = decode_prefixes(buffers)
    if len(found) != len(set(places)) or len(found) != len(places):
        raise WireError(f"{len(found)} prefixes came for the places {places}")
    return dict(zip(places, found, strict=True))


def _encode_prefixes(prefixes: Sequence[Row | None]) -> tuple[list[int], list[Frame]]:
    """Places, and four frames for each."""
    having = [(place, prefix) for place, prefix in enumerate(prefixes) if prefix is not None]
    return [place for place, _ in having], [frame for _, prefix in having for frame in encode_row(prefix)]


def _plain(leases: Held) -> list[list[Any]]:
    return [[_id(id), attempt] for id, attempt in leases]


def _id(id: TicketId) -> list[int]:
    return [id.branch, id.group, id.index]
