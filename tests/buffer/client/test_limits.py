"""Every number of every request has a bound, and is sent at it, below it and beyond it; every list from empty to its
limit. What is within is answered, what is beyond is refused by name, and the next request is served."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from asyncrl.buffer.client import BufferRefused, messages
from asyncrl.buffer.client.messages import REQUESTS, Start
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.limits import DECLARED, Limits
from asyncrl.buffer.loop import Service
from asyncrl.buffer.record import to_record
from asyncrl.buffer.requests.handlers import Answer, Handler
from asyncrl.buffer.requests.held import HeldRequest, HeldRequests
from asyncrl.buffer.rules import Refused
from asyncrl.trajectory import TicketId
from asyncrl.wire import WireError, pack, unpack
from tests.buffer.fakes import learner, open_buffer, play, reopen, rules, step, trajectory
from tests.buffer.processes import BufferProcess

LIMITS = Limits.of(rules(), (0, 0), 8)
LEASE = [{"branch": 0, "group": 0, "index": 0}, 0]
WHO = {"n": 1, "actor": "actor-0"}
REQUIRED: dict[str, dict[str, Any]] = {
    "hello": {"role": "actor", "who": "actor-0"},
    "tickets": {"held": [0, 0], "credits": 1, "leased": [], "wait_s": 0.0, "logged": [0, "d"]},
    "renew": {"leases": []},
    "put": {},
    "turn": {},
    "fail": {"id": LEASE[0], "attempt": 0, "reason": "x", "detail": "x"},
    "release": {"leases": []},
    "scoring": {
        "scorer": "scorer-0",
        "credits": 1,
        "leased": [[0, 0]],
        "returned": [[0, 0]],
        "silent": "",
        "wait_s": 0.0,
        "logged": [0, "d"],
    },
    "scored": {},
    "start": {"batch": 0, "version": 0},
    "batch": {"incarnation": 1, "b": 0, "dp_rank": 0, "dp_size": 1, "wait_s": 0.0},
    "finished": {"incarnation": 1, "b": 0, "outcome": "applied"},
    "published": {"incarnation": 1, "branch": 0, "version": 0, "digest": "d"},
    "checkpointed": {"incarnation": 1, "version": 0, "batch": 0, "path": "x"},
    "evaluate": {"version": [0, 0]},
    "evaluation": {"everyone": True, "lost": [0, 0]},
    "status": {},
    "page": {"group": 0, "batch": 0},
    "record": {"group": 0, "index": 0},
    "caused": {},
    "stop": {},
}
"""Each request with its fields, all numbers within their bounds."""


def header(op: str, **fields: Any) -> bytes:
    return pack({"op": op} | WHO | REQUIRED[op] | fields)


def bounds(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float | None, float | None]]:
    """Every number in a type of msgspec: where it stands, its least and its largest value."""
    inspect = msgspec.inspect
    match node:
        case inspect.Metadata():
            yield from bounds(node.type, place)
        case inspect.IntType() | inspect.FloatType():
            yield place, node.ge, node.le
        case inspect.StructType() | inspect.DataclassType():
            array = getattr(node, "array_like", False)
            for index, field in enumerate(node.fields):
                yield from bounds(field.type, (*place, index if array else field.encode_name))
        case inspect.TupleType():
            for index, each in enumerate(node.item_types):
                yield from bounds(each, (*place, index))
        case inspect.CollectionType() | inspect.ListType():
            yield from bounds(node.item_type, (*place, 0))
        case inspect.UnionType():
            for each in node.types:
                yield from bounds(each, place)


NUMBERS = [
    (request, place, least, most)
    for request in REQUESTS
    for place, least, most in bounds(msgspec.inspect.type_info(request))
]


def test_every_number_of_every_request_has_two_bounds_and_every_list_has_one() -> None:
    assert len(NUMBERS) > 40, "a check of the check"
    for request, place, least, most in NUMBERS:
        assert least is not None, f"{request.__name__}.{place} has no least value"
        assert most is not None, f"{request.__name__}.{place} has no largest value"
        assert most <= 2**53, f"{request.__name__}.{place} goes up to {most}"
    for request in REQUESTS:
        named = {place[0] for place, _ in DECLARED[request]}
        for field in msgspec.inspect.type_info(request).fields:  # type: ignore[attr-defined]
            if "Sequence" in str(messages.__annotations__.get(field.name, "")) or "List" in type(field.type).__name__:
                assert field.encode_name in named, f"the length of {request.__name__}.{field.name} has no bound"


def largest(request: type[Any], place: tuple[Any, ...], most: float | None) -> float:
    """The largest value of a number in this run."""
    named = [getattr(LIMITS, bound) for at, bound in DECLARED[request] if at == place]
    assert most is not None
    return min([most, *named])


def filled(request: type[Any], place: tuple[Any, ...], value: Any) -> bytes:
    """A good request of the kind, with this value at this place."""
    op = request.__struct_config__.tag
    fields = unpack(header(op))
    if op == "batch" and place == ("dp_rank",):
        fields["dp_size"] = LIMITS.ranks
    if place[0] == "told":
        fields["told"] = {"waited": 0.0, "ess": 1.0, "lr": 0.0}
    where: Any = fields
    for at, following in zip(place, [*place[1:], None], strict=True):
        if following is None:
            where[at] = value
        elif isinstance(where, list) and not where:
            where.append([dict(LEASE[0]), 0] if following in (0, 1) else 0)  # type: ignore[call-overload]
            where = where[at]
        else:
            where = where[at] if not isinstance(where, dict) else where.setdefault(at, [])
    return pack(fields)


@pytest.mark.parametrize(
    ("request_type", "place", "least", "most"),
    NUMBERS,
    ids=[f"{r.__struct_config__.tag}.{'.'.join(map(str, p))}" for r, p, _, _ in NUMBERS],
)
def test_a_number_is_taken_up_to_its_bound_and_refused_beyond(
    request_type: type[Any], place: tuple[Any, ...], least: float, most: float
) -> None:
    top = largest(request_type, place, most)
    for good in (max(least, 0), top):
        if place == ("dp_rank",) and good == top:
            good = top - 1  # less than dp_size, which is at most the same
        if place == ("dp_size",) and good == 0:
            good = 1
        LIMITS.decode([filled(request_type, place, good)])
    for bad in (least - 1, top + 1, 2**63 - 1, 2**64 - 1, -(2**63), float("nan"), float("inf"), 1e308):
        with pytest.raises(WireError):
            LIMITS.decode([filled(request_type, place, bad)])


def test_a_list_is_taken_up_to_its_limit_and_a_header_up_to_its_size() -> None:
    for op, name in (("tickets", "leased"), ("renew", "leases"), ("release", "leases")):
        for count in (0, 1, LIMITS.leases):
            LIMITS.decode([header(op, **{name: [LEASE] * count})])
        with pytest.raises(WireError, match=f"{name} has .* at most {LIMITS.leases}"):
            LIMITS.decode([header(op, **{name: [LEASE] * (LIMITS.leases + 1)})])
        with pytest.raises(WireError, match="bytes, at most"):
            LIMITS.decode([header(op, **{name: [LEASE] * 100_000})])
    for name in ("leased", "returned"):
        LIMITS.decode([header("scoring", **{name: [[2**41 - 1, 2**31 - 1]] * LIMITS.scoring})])
        with pytest.raises(WireError, match=f"{name} has .* at most {LIMITS.scoring}"):
            LIMITS.decode([header("scoring", **{name: [[0, 0]] * (LIMITS.scoring + 1)})])
    largest = [{"branch": 2**31 - 1, "group": 2**41 - 1, "index": 2**20 - 1}, 2**31 - 1]
    assert len(header("renew", leases=[largest] * LIMITS.leases)) <= LIMITS.header_bytes


@pytest.mark.parametrize("op", sorted(REQUIRED))
def test_frames_that_no_request_has_are_refused(op: str) -> None:
    most = {"put": messages.MAX_PUTS, "turn": messages.MAX_PUTS, "release": 0, "scored": 1}.get(op, 0)
    LIMITS.decode([header(op), *[b""] * most])
    with pytest.raises(WireError, match="frames behind its header"):
        LIMITS.decode([header(op), *[b""] * (most + 1)])


def test_a_row_that_no_episode_has_is_refused_at_its_put(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "b", row_tokens=10)
    service = Service(buffer, f"ipc://{tmp_path}/s", 0.0)
    said = []
    for tokens in (8, 9):
        service._handle(b"peer", [header("put"), to_record(trajectory(TicketId(0, 0, 0), tokens=tokens))])
        said.append(unpack(service.outbox.replies.pop()[1][0])["reply"][0]["code"])
    assert said == ["unknown_ticket", "malformed"]
    service.close()
    buffer.database.close()


def start_of(buffer: Buffer, batch: int, version: int, branch: int) -> Start:
    """A learner offers a checkpoint in a message."""
    offered: Any = buffer.limits.decode([header("start", batch=batch, version=version, branch=branch)])
    return buffer.start(offered.batch, offered.version, offered.branch)


def test_a_resume_offers_checkpoints_of_a_branch_that_was_left_and_passes_over_them(tmp_path: Path) -> None:
    """`--fresh` at version 1 with fewer steps was killed before the first checkpoint of the new branch."""
    buffer = open_buffer(tmp_path)
    incarnation = learner(buffer)
    for b in range(5):
        play(buffer)
        step(buffer, incarnation, b)
    buffer = reopen(buffer, tmp_path, steps=2)
    assert buffer.start(1, 1, 0, fresh=True).branch == 1
    buffer = reopen(buffer, tmp_path, steps=2)
    with pytest.raises(Refused) as refused:
        start_of(buffer, 5, 5, 0)
    assert refused.value.code == "unknown_checkpoint"
    held = buffer.limits.decode([header("tickets", held=[0, 5])])
    assert held.op == "tickets", "an actor may still hold the weights of the branch that was left"
    assert start_of(buffer, 1, 1, 0).batch == 1
    buffer.database.close()


def test_a_checkpoint_that_the_ledger_never_had_is_unknown_to_it(tmp_path: Path) -> None:
    """The ledger was restored from an older checkpoint, because that in the newest is damaged."""
    buffer = open_buffer(tmp_path, steps=2)
    with pytest.raises(Refused) as refused:
        start_of(buffer, 80, 80, 0)
    assert refused.value.code == "unknown_checkpoint"
    buffer.database.close()


def test_batches_that_were_skipped_stay_within_the_bound_when_fewer_may_be(tmp_path: Path) -> None:
    """`learner.max_skipped` is lowered with a resume."""
    buffer = open_buffer(tmp_path, steps=2, max_skipped=7)
    incarnation = learner(buffer)
    for b in range(7):
        play(buffer)
        assert buffer.batch(0, incarnation, b).state == "ready"
        buffer.finished(incarnation, b, "guard")
    play(buffer)
    step(buffer, incarnation, 7)
    buffer = reopen(buffer, tmp_path, steps=2, max_skipped=0)
    at = start_of(buffer, 8, 1, 0)
    for b in (8, 9):
        for op in ("batch", "finished"):
            asked: Any = buffer.limits.decode([header(op, incarnation=at.incarnation, b=b)])
            assert asked.b == b
    buffer.limits.decode([header("checkpointed", incarnation=at.incarnation, batch=9, version=2)])
    buffer.database.close()


# Requests that are held


class FakeHandlers:
    """A kind of request that is answered once `open`; counts how often it was tried."""

    def __init__(self) -> None:
        self.open = False
        self.tried = 0

    def answer(self, request: Any, frames: Any, at_once: bool) -> Answer | None:
        self.tried += 1
        return Answer("yes") if self.open or at_once else None


def held(peer: bytes, n: int, handlers: FakeHandlers, until: float = 60.0) -> HeldRequest:
    request = messages.TicketsRequest("a", (0, 0), 1, (), 60.0, n=n)
    return HeldRequest(peer, request, Handler(handlers.answer, alike=lambda _: "one kind"), until, 0.0)


def line(reaches: Callable[[bytes], bool], count: int, handlers: FakeHandlers, until: float = 60.0) -> HeldRequests:
    waiting = HeldRequests(reaches)
    for i in range(count):
        waiting.add(held(f"peer-{i}".encode(), 1, handlers, until))
    return waiting


def test_a_round_costs_the_same_however_many_wait() -> None:
    handlers = FakeHandlers()
    waiting = line(lambda _: True, 14_000, handlers)
    for round in range(10):
        assert list(waiting.answered(round / 10)) == []
    assert handlers.tried == 10
    handlers.open = True
    assert [h.peer for h, _ in waiting.answered(2.0)] == [f"peer-{i}".encode() for i in range(14_000)]
    assert len(waiting) == 0


def test_a_peer_that_is_gone_is_given_nothing() -> None:
    handlers = FakeHandlers()
    waiting = line(lambda peer: peer == b"peer-99", 100, handlers)
    handlers.open = True
    assert [h.peer for h, _ in waiting.answered(1.0)] == [b"peer-99"]
    assert (len(waiting), handlers.tried) == (0, 1)


def test_requests_whose_time_is_over_are_answered_some_at_a_time() -> None:
    handlers = FakeHandlers()
    waiting = line(lambda _: True, 200, handlers, until=1.0)
    rounds = [len(list(waiting.answered(1.0))) for _ in range(4)]
    assert rounds == [64, 64, 64, 8]


def test_when_too_many_are_held_the_oldest_is_answered_and_no_peer_is_refused_for_another() -> None:
    handlers = FakeHandlers()
    waiting = line(lambda _: True, 16_384, handlers)
    waiting.add(held(b"honest", 1, handlers))
    assert [h.peer for h, _ in waiting.answered(0.1)] == [b"peer-0"]
    for n in range(2, 65):
        waiting.add(held(b"honest", n, handlers))
    with pytest.raises(Refused, match="64 requests of this peer"):
        waiting.add(held(b"honest", 65, handlers))


# The real process


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[BufferProcess]:
    process = BufferProcess(tmp_path / "run")
    process.start()
    yield process
    process.close()


def raw(address: str, name: bytes) -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    for option, value in ((zmq.ROUTING_ID, name), (zmq.SNDHWM, 0), (zmq.LINGER, 0)):
        socket.setsockopt(option, value)
    socket.connect(address)
    return socket


def test_a_request_of_all_ranks_and_more_is_refused_and_the_buffer_serves(buffer: BufferProcess) -> None:
    """Before, dp_size 10**9 took 17 GB in three minutes."""
    learner, incarnation = buffer.learner()
    actor = buffer.client("actor-0")
    for ticket in actor.tickets("actor-0", (0, 0), 8, [], 5.0).tickets:
        actor.put(trajectory(ticket, (0,), float(ticket.id.index)))
    assert learner.batch(incarnation, 0, 1, 2, 5.0).state == "ready"
    for size in (3, 10**9, 2**53):
        with pytest.raises(BufferRefused, match=r"dp_size is .* at most 2"):
            learner.batch(incarnation, 0, 0, size, 5.0)
    assert learner.status()["batches"] == 1


def test_requests_of_peers_that_left_draw_no_tickets(buffer: BufferProcess) -> None:
    """Before, a run stood still until the last of them was over: 89 s behind 14,000."""
    learner, _ = buffer.learner()
    rng = random.Random(1)
    full = buffer.client("actor-0").tickets("actor-0", (0, 0), 64, [], 5.0).tickets
    assert full
    for i in range(50):
        peer = raw(buffer.address, b"peer-%d" % i)
        for n in range(1, 65):
            fields = {"actor": f"peer-{i}", "held": [0, 0], "credits": rng.randrange(1, 65), "wait_s": 60.0}
            peer.send(header("tickets", **fields, n=n))
        peer.send(header("status", n=99))
        assert peer.poll(10_000)
        peer.close(0)
    time.sleep(1.0)
    buffer.client("actor-0").release("actor-0", [(t.id, t.attempt) for t in full])
    assert len(buffer.client("actor-1").tickets("actor-1", (0, 0), 64, [], 10.0).tickets) == len(full)
    assert set(learner.status()["leases"]) == {"actor-1"}


@pytest.mark.system
def test_a_message_of_a_million_frames_is_one_malformed_message(buffer: BufferProcess) -> None:
    learner, _ = buffer.learner()
    peer = raw(buffer.address, b"evil")
    peer.send_multipart([header("status"), *[b""] * 200_000])
    assert peer.poll(30_000)
    assert "frames" in unpack(peer.recv_multipart()[0])["error"]["message"]
    peer.close(0)
    assert learner.status()["service"]["refused"] == 1
