"""What an interrupted attempt had sampled is kept with its ticket, and every one of them ends in one way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.buffer.client import codec, messages
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.loop import Service
from asyncrl.buffer.rules import Refused
from asyncrl.trajectory import CONTEXT, Row, Ticket, TicketId
from asyncrl.trajectory.kept_ids import KeptIds
from asyncrl.wire import WireError, decode_prefixes, encode_prefix, unpack
from tests.buffer.fakes import learner, open_buffer, put, trajectory


def prefix(versions: tuple[int, ...] = (0, 0), prompt: int = 2) -> Row:
    """As `trajectory` of the fakes begins."""
    n = prompt + len(versions)
    mask = np.arange(n) >= prompt
    said = np.concatenate([np.full(prompt, CONTEXT), versions]).astype(np.int32)
    return Row(np.arange(n, dtype=np.int32), mask, np.where(mask, -0.5, 0.0).astype(np.float32), said)


def issue(buffer: Buffer, actor: str = "actor-0", version: int = 0, credits: int = 1) -> list[Ticket]:
    return buffer.issue(0.0, actor, (0, version), credits)[0]


def hand_back(buffer: Buffer, ticket: Ticket, kept: Row, actor: str = "actor-0") -> None:
    buffer.release(actor, [(ticket.id, ticket.attempt)], prefixes={0: kept})


def counts(buffer: Buffer) -> dict[str, int]:
    found: dict[str, int] = buffer.status()["prefixes"]
    return found


def opened(tmp_path: Path, **changes: Any) -> Buffer:
    buffer = open_buffer(tmp_path, **changes)
    learner(buffer)
    return buffer


def train_on(buffer: Buffer, incarnation: int, b: int) -> None:
    """One training step; what is left of incomplete groups is given back."""
    tickets = issue(buffer, "other", b, 100)
    groups: dict[int, list[Ticket]] = {}
    for ticket in tickets:
        groups.setdefault(ticket.id.group, []).append(ticket)
    back: list[Ticket] = []
    for members in groups.values():
        if len(members) == 2:
            for ticket in members:
                put(buffer, trajectory(ticket, (b,)))
        else:
            back += members
    buffer.release("other", [(t.id, t.attempt) for t in back])
    assert buffer.batch(0.0, incarnation, b).state == "ready"
    buffer.finished(incarnation, b, "applied")
    buffer.published(incarnation, 0, b + 1, "digest")


def test_the_next_attempt_gets_what_was_sampled_and_goes_on_behind_it(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    (first,) = issue(buffer)
    assert first.prefix is None
    hand_back(buffer, first, prefix())
    buffer.commit(0.0)
    assert counts(buffer) == {"kept": 1}
    buffer.database.close()

    buffer = open_buffer(tmp_path)  # the buffer was killed
    (second,) = issue(buffer, "actor-1")
    assert (second.id, second.attempt) == (first.id, 1)
    assert second.prefix is not None
    assert second.prefix.begins_with(prefix())
    assert len(second.prefix) == 4
    buffer.release("actor-1", [(second.id, second.attempt)])  # untouched: it stays

    (third,) = issue(buffer, "actor-2")
    assert third.prefix is not None
    assert put(buffer, trajectory(third, (0, 0, 0, 0))) == "stored"
    assert counts(buffer) == {"continued": 1}
    ended = buffer.database.read("SELECT attempt, ended FROM attempts ORDER BY attempt")
    assert list(ended) == [(0, "handed_back"), (1, "released"), (2, "stored")]
    assert buffer.tickets.carried.prefixes.wasted == 0


def test_a_longer_one_takes_its_place_and_one_that_was_not_used_is_counted(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    (ticket,) = issue(buffer)
    hand_back(buffer, ticket, prefix((0, 0)))
    (ticket,) = issue(buffer)
    hand_back(buffer, ticket, prefix((0, 0, 0)))
    (ticket,) = issue(buffer)
    assert ticket.prefix is not None
    assert len(ticket.prefix) == 5
    other = trajectory(ticket, (0, 0, 0, 0))
    row = replace(other.rows[0], token_ids=other.rows[0].token_ids + 1)
    put(buffer, replace(other, rows=(row,)))
    assert counts(buffer) == {"anew": 1, "longer": 1}
    assert buffer.tickets.carried.prefixes.wasted == 3


def test_an_earlier_attempt_that_sampled_the_same_has_not_continued_it(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    (first,) = issue(buffer)
    buffer.release("actor-0", [(first.id, first.attempt)])
    (second,) = issue(buffer, "actor-1")
    hand_back(buffer, second, prefix((0, 0)), "actor-1")
    assert put(buffer, trajectory(first, (0, 0, 0))) == "stored"
    assert counts(buffer) == {"anew": 1}
    assert buffer.tickets.carried.prefixes.wasted == 2


def test_its_oldest_token_counts_for_the_bound(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, max_staleness=1)
    incarnation = learner(buffer)
    kept, over = issue(buffer, credits=2)
    hand_back(buffer, over, prefix((0, 0)))
    train_on(buffer, incarnation, 0)
    (again,) = issue(buffer, "actor-1", 1)
    assert again.id == over.id
    assert again.prefix is not None
    assert again.min_version == (0, 1), "the actor must hold the newest all the same"
    assert [lease.min_version for lease in buffer.leases if lease.id == over.id] == [0]
    buffer.release("actor-1", [(again.id, again.attempt)])
    train_on(buffer, incarnation, 1)
    (again,) = issue(buffer, "actor-1", 2, 1)
    assert again.id == over.id
    assert again.prefix is None, "past the bound"
    assert counts(buffer) == {"stale": 1}
    assert kept.id.group == over.id.group


def test_a_failure_and_a_drop_end_it(tmp_path: Path) -> None:
    buffer = opened(tmp_path, env_retries=0)
    one, two = issue(buffer, credits=2)
    hand_back(buffer, one, prefix())
    hand_back(buffer, two, prefix())
    again, _ = issue(buffer, credits=2)
    buffer.fail("actor-0", again.id, again.attempt, "env_error", "boom")
    assert counts(buffer) == {"dropped": 1, "failed": 1}
    assert buffer.tickets.carried.prefixes.wasted == 4


def test_one_of_a_version_that_nobody_has_is_refused_and_the_ticket_stays_issued(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    (ticket,) = issue(buffer)
    with pytest.raises(Refused, match="version 7, the learner is at 0"):
        hand_back(buffer, ticket, prefix((7,)))
    assert len(buffer.leases) == 1
    assert counts(buffer) == {}


def test_of_a_lease_that_is_not_held_it_is_ignored(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    (ticket,) = issue(buffer)
    with pytest.raises(Refused, match="leased to actor-0"):
        hand_back(buffer, ticket, prefix(), "somebody")
    assert counts(buffer) == {}
    hand_back(buffer, ticket, prefix())
    hand_back(buffer, ticket, prefix())  # the message came twice
    assert counts(buffer) == {"kept": 1}


def test_they_travel_beside_tickets_and_leases() -> None:
    ticket = Ticket(TicketId(0, 1, 2), 0, "train", {"id": "t"}, (0, 0), 2, 1.0, 1, 30.0)
    made, frames = codec.ticket_reply([ticket, replace(ticket, prefix=prefix()), ticket], "")
    header = codec.decode_header(codec.encode_reply(1, made))
    reply = codec.decode_reply(messages.TicketsRequest("a", (0, 0), 1, (), 0.0), header, frames)
    assert [t.prefix is None for t in reply.tickets] == [True, False, True]
    assert reply.tickets[1].prefix is not None
    assert reply.tickets[1].prefix.digest() == prefix().digest()
    places, frames = codec.encode_prefixes([None, prefix()])
    assert codec.prefixes_at(places, frames, 2)[1].begins_with(prefix())


@pytest.mark.parametrize(
    ("places", "change", "says"),
    [
        ([2], None, "places below 2"),
        ([0, 1], None, "1 prefixes came for 2 places"),
        ([0], lambda frames: frames[:3], "6 frames each"),
        ([0], lambda frames: [b"", *frames[1:]], "none of the first 4 empty"),
        ([0], lambda f: [f[0], bytes(4), f[2], np.full(4, CONTEXT, np.int32).tobytes(), *f[4:]], "a prompt and"),
        ([0], lambda frames: [frames[0], frames[1][:3], *frames[2:]], "has 3 bytes"),
    ],
)
def test_what_is_no_prefix_is_refused(places: list[int], change: Any, says: str) -> None:
    frames: Any = [bytes(frame) for frame in encode_prefix(prefix())]
    with pytest.raises(WireError, match=says):
        codec.prefixes_at(places, change(frames) if change else frames, 2)
    assert len(decode_prefixes(frames)) == 1


def test_a_prefix_that_no_episode_of_the_run_has_is_refused_and_nothing_is_released(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "b", row_tokens=10, max_kept=2)
    service = Service(buffer, f"ipc://{tmp_path}/s", 0.0)
    (ticket,) = issue(buffer)
    ids = np.arange(8, dtype=np.int32)

    def said(kept: Row) -> dict[str, Any]:
        places, frames = codec.encode_prefixes([kept])
        request = messages.ReleaseRequest("actor-0", [(ticket.id, ticket.attempt)], places)
        service._handle(b"peer", [codec.encode_request(request, 1), *frames])
        return dict(unpack(service.outbox.replies.pop()[1][0]))

    long = said(prefix((0,) * 9))["error"]
    assert "prefix of ticket 0.0.0 has 11 tokens, expected at most 10" in long["message"]
    many = replace(prefix((0,) * 8), kept=KeptIds(np.array([3] + [0] * 7, np.uint16), np.array([1, 2, 3], np.int32)))
    many = replace(many, token_ids=np.concatenate([ids[:2], [2], ids[:7]]).astype(np.int32))
    assert "has 3 kept ids, expected at most 2 (actors.max_kept)" in said(many)["error"]["message"]
    assert counts(buffer) == {}
    assert not said(prefix((0,) * 8)).get("error"), "the bound itself is taken"
    assert counts(buffer) == {"kept": 1}
    service.close()
    buffer.database.close()
