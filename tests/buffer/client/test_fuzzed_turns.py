"""A million damaged messages about recorded turns: to a real buffer, and to an actor that continues an episode."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from asyncrl.audit.checks.stored.turns import turns as checked
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.client import BufferRefused, codec, messages
from asyncrl.trajectory import Ticket, TicketId
from asyncrl.trajectory.turns import RecordedAnswer, RecordedSample
from asyncrl.wire import WireError, pack, unpack
from asyncrl.wire.turns import encode_turn
from tests.buffer.fuzzing import mutations
from tests.buffer.processes import CONFIG, BufferProcess
from tests.buffer.tickets.test_turns import RESET, answer, episode, sample

MANY = int(os.environ.get("ASYNCRL_TEST_MESSAGES", "1000000"))
OF_A_LEASE = 1000
AHEAD = 3
"""Turns that the good messages go on by."""


def good(ticket: Ticket) -> list[list[bytes]]:
    """Requests that record what may come next in the episode of a ticket, in one or several. Of each group the second
    episode is an agent's, whose replies have no answers."""
    begun = [r.number for r in ticket.turns if isinstance(r, RecordedAnswer | RecordedSample)]
    at, agent = max(begun, default=0), ticket.id.index % 2 == 1
    each: list[Any] = [] if agent else [RESET]
    for number in range(at, at + AHEAD):
        whole = sample(number, summary=agent, beside=number % 2 if agent else 0)
        partial = replace(whole, token_ids=whole.token_ids[:2], logprobs=whole.logprobs[:2])
        each += [replace(partial, versions=whole.versions[:2], stop_reason="abort"), whole]
        each += [] if agent else [answer(number)]
    frames = [encode_turn(ticket.id, ticket.attempt, record) for record in each]
    header = pack({"op": "turn", "n": 1, "who": "actor-0", "actor": "actor-0"})
    return [[header, *frames], *([header, frame] for frame in frames)]


def said(reply: dict[str, Any]) -> Iterator[str]:
    """What became of a request, or of each of its turns."""
    if "error" in reply:
        yield reply["error"]["code"]
    elif isinstance(reply["reply"], list):
        yield from (one if isinstance(one, str) else one["code"] for one in reply["reply"])
    else:
        yield "other"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_damaged_turns_to_a_real_buffer(tmp_path: Path) -> None:
    """`ASYNCRL_TEST_MESSAGES`: another number. Every `OF_A_LEASE`, the ticket is issued again with what was recorded,
    or fails; in the end the audit finds nothing in the ledger."""
    buffer = BufferProcess(tmp_path / "run", buffer={**CONFIG["buffer"], "turns": "on", "lease_s": 3600.0})
    buffer.start()
    outcomes, carried, sizes = Counter[str](), 0, []
    try:
        learner, _ = buffer.learner()
        actor = buffer.client("actor-0")
        assert buffer.process is not None
        process = psutil.Process(buffer.process.pid)
        raw = zmq.Context.instance().socket(zmq.DEALER)
        raw.setsockopt(zmq.SNDHWM, 0)
        raw.connect(buffer.address)
        for lease in range(MANY // OF_A_LEASE):
            (ticket,) = actor.tickets("actor-0", (0, 0), 1, (), 20.0).tickets
            carried += len(ticket.turns)
            for bad in mutations(good(ticket), OF_A_LEASE, seed=lease):
                raw.send_multipart(bad)
            answered = 0
            while answered < OF_A_LEASE and raw.poll(2000):
                outcomes.update(said(unpack(raw.recv_multipart()[0])))
                answered += 1
            outcomes["unanswered"] += OF_A_LEASE - answered
            if lease % 5 == 4:
                actor.fail(ticket.id, ticket.attempt, "env_error", "x")
            else:
                actor.release("actor-0", [(ticket.id, ticket.attempt)])
            sizes.append(process.memory_info().rss >> 20)
        assert learner.status()["version"] == 0, "alive"
        raw.close(0)
    finally:
        buffer.close()
    ledger = read_ledger(buffer.run.buffer)
    print(
        f"{MANY} sent: {dict(outcomes)}; {len(ledger.tables['turns'])} rows, {carried} turns in resumed tickets; "
        f"MB {sizes[:: max(1, len(sizes) // 10)]}"
    )
    assert outcomes["malformed"] > MANY / 4
    assert min(outcomes["stored"], outcomes["revoked"], carried) > MANY / OF_A_LEASE
    assert sizes[-1] < 1.2 * sizes[len(sizes) // 10] + 10, "memory is flat once it is warm"
    with closing(PayloadFiles(buffer.run.buffer / "payloads")) as files:
        assert list(checked(ledger, files.read)) == []
    assert MANY / OF_A_LEASE < len(ledger.tables["turns"]) <= outcomes["stored"], "one that came before is stored once"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_damaged_tickets_with_turns() -> None:
    """The same number, to the client of an actor."""
    asked = messages.TicketsRequest("actor-0", (0, 0), 2, (), 0.0)
    bare = Ticket(TicketId(0, 1, 0), 0, "train", {"id": "t"}, (0, 0), 4, 1.0, 1, 30.0, durable=True)
    replies = (sample(0, summary=True), sample(1, summary=True, beside=1))
    reply, frames = codec.ticket_reply([replace(bare, turns=tuple(episode(2))), replace(bare, turns=replies)], "")
    whole = [codec.encode_reply(1, reply), *map(bytes, frames)]
    read = refused = 0
    for bad in mutations([whole], MANY, seed=31):
        try:
            tickets = codec.decode_reply(asked, codec.decode_header(bad[0]), bad[1:]).tickets
        except (WireError, BufferRefused):
            refused += 1
        else:
            assert sum(len(ticket.turns) for ticket in tickets) == len(bad) - 1
            read += 1
    print(f"{read} read, {refused} refused")
    assert min(read, refused) > MANY / 20
