"""What attempts recorded of their episodes is kept with its ticket, goes on with it, and ends in one way."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.audit.checks.history import history
from asyncrl.audit.checks.stored.turns import turns as checked
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.client import BufferClient, BufferRefused
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.in_process import InProcessBuffer
from asyncrl.buffer.retention import ROOM_FOR_TURNS
from asyncrl.buffer.rules import Refused
from asyncrl.trajectory import CONTEXT, Row, Span, Ticket, Trajectory, TurnReward
from asyncrl.trajectory.turns import Recorded, RecordedAnswer, RecordedReset, RecordedSample, ids_digest
from asyncrl.wire.turns import decode_turn, encode_turn, tools_digest
from tests.buffer.fakes import FakeSource, learner, open_buffer, put, reopen, rules, step, trajectory
from tests.buffer.processes import CONFIG, BufferProcess

RESET = RecordedReset([{"role": "user", "content": "?"}], tools_digest([]), None, b"at 0")


def sample(number: int, version: int = 0, tokens: int = 3, **about: Any) -> RecordedSample:
    ids = np.arange(tokens, dtype=np.int32) + 10 * number
    versions = np.full(tokens, version, np.int32)
    given: dict[str, Any] = {"stop_reason": "stop", "prompt": ids_digest([number])} | about
    return RecordedSample(number, ids, np.full(tokens, -0.5, np.float32), versions, **given)


def answer(number: int) -> RecordedAnswer:
    message = {"role": "tool", "content": str(number)}
    return RecordedAnswer(number, [message], 0.25, False, snapshot=f"at {number + 1}".encode())


def episode(turns: int, version: int = 0) -> list[Recorded]:
    """The reset, and so many turns with their answers."""
    return [RESET, *(r for n in range(turns) for r in (sample(n, version), answer(n)))]


def played(ticket: Ticket, samples: Sequence[RecordedSample], actor: str = "actor-0") -> Trajectory:
    """One context token before each sample, in one row."""
    ids, mask, logprobs, versions, spans = [], [], [], [], []
    for one in samples:
        n = len(one.token_ids)
        ids += [7, *one.token_ids.tolist()]
        mask += [False] + [True] * n
        logprobs += [0.0, *one.logprobs.tolist()]
        versions += [CONTEXT, *one.versions.tolist()]
        spans.append(Span(0, len(ids) - n, n))
    row = Row(np.array(ids, np.int32), np.array(mask), np.array(logprobs, np.float32), np.array(versions, np.int32))
    earned = tuple(TurnReward(1.0 / len(spans), (span,)) for span in spans)
    made = replace(trajectory(ticket), rows=(row,), turns=len(spans), turn_rewards=earned, actor=actor)
    return replace(made, reward=sum(each.reward for each in earned))


def issue(buffer: Buffer, actor: str = "actor-0", credits: int = 1) -> list[Ticket]:
    history = buffer.ledger.history
    return buffer.issue(0.0, actor, (history.branch, history.published or 0), credits)[0]


def record(buffer: Buffer, ticket: Ticket, records: Sequence[Recorded], actor: str = "actor-0") -> list[str]:
    said = []
    for each in records:
        id, attempt, turn = decode_turn(encode_turn(ticket.id, ticket.attempt, each))
        said.append(buffer.record_turn(actor, id, attempt, turn))
    return said


def counts(buffer: Buffer) -> dict[str, int]:
    found: dict[str, int] = buffer.status()["turns"]
    return found


def opened(tmp_path: Path, **changes: Any) -> Buffer:
    buffer = open_buffer(tmp_path, durable=True, **changes)
    learner(buffer)
    return buffer


def violations(buffer: Buffer, folder: Path, *, adds_up: bool = True) -> list[str]:
    """Commits. `adds_up`: the buffer's own counts are those of the ledger, which the test has not changed."""
    buffer.commit(0.0)
    files = PayloadFiles(folder / "payloads")
    ledger = read_ledger(folder)
    found = [*checked(ledger, files.read), *(v for v in history(ledger, [], (), ()) if "was issued for" in v)]
    files.close()
    if adds_up:
        assert buffer.tickets.carried.turns.recorded == len(ledger.tables["turns"]) == sum(counts(buffer).values())
    return found


def test_an_episode_goes_on_at_its_turn_on_another_actor_and_through_a_killed_buffer(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    (first,) = issue(buffer)
    assert first.durable
    assert first.turns == ()
    assert record(buffer, first, episode(2)) == ["stored"] * 5
    assert violations(buffer, tmp_path) == []
    buffer = reopen(buffer, tmp_path, durable=True)
    buffer.joined("actor-0")  # it was killed, and comes back
    (second,) = issue(buffer, "actor-1")
    assert (second.id, second.attempt) == (first.id, 1)
    assert [r.named for r in second.turns] == ["answer -1", "intent 0", "answer 0", "intent 1", "answer 1"]
    assert [getattr(r, "snapshot", None) for r in second.turns] == [None, None, None, None, b"at 2"]
    assert record(buffer, second, [sample(2)], "actor-1") == ["stored"]
    assert violations(buffer, tmp_path) == []
    carried = [r for r in second.turns if isinstance(r, RecordedSample)]
    assert put(buffer, played(second, [*carried, sample(2)])) == "stored"
    assert counts(buffer) == {"continued": 6}
    assert buffer.tickets.carried.turns.wasted == 0
    assert (buffer.tickets.carried.turns.resumed, buffer.tickets.carried.turns.carried_tokens) == (1, 6)
    assert violations(buffer, tmp_path) == []
    assert buffer.database.payloads.disk_bytes > 500


def test_a_turn_of_an_attempt_that_does_not_hold_the_ticket_is_revoked(tmp_path: Path) -> None:
    buffer = opened(tmp_path, lease_s=10.0)
    (first,) = issue(buffer)
    record(buffer, first, episode(1))
    assert record(buffer, first, [sample(1)], "actor-1") == ["revoked"]
    buffer.tick(11.0)
    assert record(buffer, first, [sample(1)]) == ["revoked"], "its lease lapsed"
    (second,) = issue(buffer, "actor-1")
    assert record(buffer, first, [sample(1)]) == ["revoked"]
    assert record(buffer, second, [sample(1)], "actor-1") == ["stored"]
    assert put(buffer, played(second, [sample(0), sample(1)])) == "stored"
    assert record(buffer, second, [answer(1)], "actor-1") == ["revoked"], "its trajectory is stored"
    assert counts(buffer) == {"continued": 4}
    assert violations(buffer, tmp_path) == []


def test_turns_come_in_their_order_and_a_repeat_changes_nothing(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    (ticket,) = issue(buffer)
    with pytest.raises(Refused, match=r"answer 0 of attempt 0 at ticket 0.0 came, expected answer -1 or intent 0"):
        record(buffer, ticket, [answer(0)])
    record(buffer, ticket, episode(1))
    assert record(buffer, ticket, [answer(0)]) == ["stored"]
    wrong: list[Recorded] = [replace(RESET, snapshot=None), replace(answer(0), reward=3.0), sample(2), answer(1)]
    for each in (*wrong, sample(0, tokens=1)):
        with pytest.raises(Refused, match=r"expected intent 1$"):
            record(buffer, ticket, [each])
    assert counts(buffer) == {"kept": 3}
    record(buffer, ticket, [sample(1, stop_reason="abort")])
    with pytest.raises(Refused, match="expected intent 1 of another attempt"):
        record(buffer, ticket, [sample(1, tokens=4)])
    assert violations(buffer, tmp_path) == []


def test_an_interrupted_sample_is_continued_or_sampled_anew(tmp_path: Path) -> None:
    for again, how, wasted in ((sample(1, tokens=5), "longer", 0), (sample(1, 1, tokens=5), "anew", 3)):
        folder = tmp_path / how
        buffer = opened(folder)
        (ticket,) = issue(buffer)
        record(buffer, ticket, [*episode(1), sample(1, stop_reason="abort")])
        buffer.release("actor-0", [(ticket.id, ticket.attempt)])
        (ticket,) = issue(buffer)
        assert ticket.turns[-1].form == "partial"
        record(buffer, ticket, [again, answer(1)])
        assert counts(buffer) == {"kept": 5, how: 1}
        assert put(buffer, played(ticket, [sample(0), again])) == "stored"
        assert counts(buffer) == {"continued": 5, how: 1}
        assert buffer.tickets.carried.turns.wasted == wasted
        assert violations(buffer, folder) == []


def test_an_interrupted_sample_counts_where_only_the_trajectory_has_the_rest(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    (ticket,) = issue(buffer)
    record(buffer, ticket, [sample(0, stop_reason="abort")])  # the environment cannot go on: no reset is recorded
    buffer.release("actor-0", [(ticket.id, ticket.attempt)])
    (ticket,) = issue(buffer)
    assert put(buffer, played(ticket, [sample(0, tokens=6)])) == "stored"
    assert counts(buffer) == {"continued": 1}
    assert violations(buffer, tmp_path) == []


@pytest.mark.parametrize(("over_age", "resumed"), [("drop", False), ("mask", True)])
def test_its_oldest_token_counts_for_the_bound(tmp_path: Path, over_age: str, resumed: bool) -> None:
    buffer = open_buffer(tmp_path, durable=True, max_staleness=1, over_age=over_age)
    incarnation = learner(buffer)
    tickets = issue(buffer, credits=6)
    record(buffer, tickets[5], episode(1))
    for ticket in tickets[:4]:
        put(buffer, trajectory(ticket))
    step(buffer, incarnation, 0)
    buffer.release("actor-0", [(tickets[5].id, 0)])
    (again,) = issue(buffer, "actor-1")
    assert again.id == tickets[5].id
    assert len(again.turns) == 3
    assert again.min_version == (0, 1), "the actor must hold the newest all the same"
    assert [lease.min_version for lease in buffer.leases if lease.id == again.id] == [0]
    record(buffer, again, [sample(1, 1)], "actor-1")
    assert violations(buffer, tmp_path) == []
    buffer.release("actor-1", [(again.id, again.attempt)])
    put(buffer, trajectory(tickets[4], (1,)))  # else its group would be dropped as stale
    for ticket in issue(buffer, credits=4):
        if ticket.id == again.id:
            buffer.release("actor-0", [(ticket.id, ticket.attempt)])
        else:
            put(buffer, trajectory(ticket, (1,)))
    for ticket in issue(buffer, credits=2):
        if ticket.id == again.id:
            buffer.release("actor-0", [(ticket.id, ticket.attempt)])
        else:
            put(buffer, trajectory(ticket, (1,)))
    step(buffer, incarnation, 1)
    (once_more,) = [t for t in issue(buffer, "actor-1", 9) if t.id == again.id]
    assert (len(once_more.turns) == 4) == resumed
    assert counts(buffer) == ({"kept": 4} if resumed else {"stale": 4})
    assert buffer.tickets.carried.turns.wasted == (0 if resumed else 6)
    assert violations(buffer, tmp_path) == []


def test_an_episode_that_starts_anew_or_fails_leaves_nothing(tmp_path: Path) -> None:
    buffer = opened(tmp_path, env_retries=9)
    ends: dict[str, int] = {}
    for reason, how in (("", "anew"), ("env_error", "failed"), ("env_diverged", "diverged")):
        (ticket,) = issue(buffer)
        record(buffer, ticket, episode(1))
        buffer.release("actor-0", [(ticket.id, ticket.attempt)])
        (ticket,) = issue(buffer)
        assert len(ticket.turns) == 3
        if reason:
            buffer.fail("actor-0", ticket.id, ticket.attempt, reason, "why")
        else:
            record(buffer, ticket, [RESET])
            buffer.fail("actor-0", ticket.id, ticket.attempt, "env_error", "why")
            ends["failed"] = 1
        ends[how] = ends.get(how, 0) + 3
        assert counts(buffer) == ends
    (ticket,) = issue(buffer)
    assert ticket.turns == ()
    record(buffer, ticket, episode(1))
    assert put(buffer, played(ticket, [sample(0, tokens=2), sample(1)])) == "stored"
    assert counts(buffer) == ends | {"continued": 1, "anew": ends["anew"] + 2}
    assert violations(buffer, tmp_path) == []


def test_the_turns_of_a_dropped_group_end_with_it_and_later_ones_where_a_branch_begins(tmp_path: Path) -> None:
    buffer = opened(tmp_path, env_retries=0)
    one, two = issue(buffer, credits=2)
    record(buffer, one, episode(1))
    buffer.fail("actor-0", two.id, two.attempt, "env_error", "boom")
    assert counts(buffer) == {"dropped": 3}
    for ticket in issue(buffer, credits=4):
        put(buffer, trajectory(ticket))
    step(buffer, 1, 0)
    (ticket,) = issue(buffer)
    record(buffer, ticket, [RESET, sample(0, 1), answer(0)])
    learner(buffer, fresh=True)
    assert buffer.ledger.history.branch == 1
    assert counts(buffer) == {"dropped": 3, "discarded_branch": 2, "kept": 1}
    assert violations(buffer, tmp_path) == []
    assert record(buffer, ticket, [sample(1)]) == ["revoked"]


def test_without_durable_turns_and_beyond_the_versions_it_is_refused(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "off")
    learner(buffer)
    (ticket,) = issue(buffer)
    assert not ticket.durable
    with pytest.raises(Refused, match="its `durable` is false"):
        record(buffer, ticket, [RESET])
    buffer.commit(0.0)
    buffer = reopen(buffer, tmp_path / "off", durable=True)
    with pytest.raises(Refused, match="durable"):
        record(buffer, ticket, [RESET])  # fixed when its group was issued
    buffer = opened(tmp_path / "on")
    incarnation = learner(buffer, publish=False)
    tickets = issue(buffer, credits=4)
    for each in tickets:
        put(buffer, trajectory(each))
    step(buffer, incarnation, 0)
    (ticket,) = issue(buffer)
    record(buffer, ticket, [RESET])
    with pytest.raises(Refused, match="has a token of version 3, the learner is at 1"):
        record(buffer, ticket, [sample(0, 3)])
    with pytest.raises(Refused, match=r"a token of version 0; attempt 0 at it was leased to actor-0 for .* version 1"):
        record(buffer, ticket, [sample(0, 0)])
    assert counts(buffer) == {"kept": 1}


def test_what_the_disk_lost_is_played_again_from_there(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    (ticket,) = issue(buffer)
    record(buffer, ticket, episode(3))
    buffer.commit(0.0)
    where = "WHERE number = 1 AND form = 'sample'"
    lost = next(iter(buffer.database.read(f"SELECT segment, start FROM turns {where}")))
    buffer.database.close()
    with (tmp_path / "payloads" / f"{lost[0]:08d}.segment").open("r+b") as file:
        file.seek(lost[1])
        file.write(b"\xc1")
    buffer = open_buffer(tmp_path, durable=True)
    buffer.joined("actor-0")
    (ticket,) = issue(buffer)
    assert [r.named for r in ticket.turns] == ["answer -1", "intent 0", "answer 0"]
    assert counts(buffer) == {"kept": 3, "lost": 4}
    record(buffer, ticket, [sample(1), answer(1)])
    assert put(buffer, played(ticket, [sample(0), sample(1)])) == "stored"
    assert counts(buffer) == {"continued": 5, "lost": 4}
    assert violations(buffer, tmp_path) == []


def test_segments_stay_while_a_ticket_has_a_turn_in_them_and_checkpoints_hold_them(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "buffer")
    (ticket,) = issue(buffer)
    record(buffer, ticket, episode(2))
    buffer = reopen(buffer, tmp_path / "buffer", durable=True)  # the next segment
    segment = tmp_path / "buffer" / "payloads" / "00000000.segment"
    assert segment.exists()
    path = tmp_path / "step-000000"
    path.mkdir()
    assert buffer.checkpointed(0.0, 1, 0, 0, path)
    assert (path / "buffer" / "payloads" / segment.name).exists()
    put(buffer, played(ticket, [sample(0), sample(1), sample(2)]))
    buffer = reopen(buffer, tmp_path / "buffer", durable=True)
    assert not segment.exists(), "nothing in it is needed"


def whole_way(client: Any, again: Any) -> None:
    """A learner, two actors that vanish in their episodes, and a third that finishes them; `again`: between them."""
    incarnation = client.start(0, 0, None).incarnation
    client.published(incarnation, 0, 0, "digest")
    client.identity = "actor-0"
    (ticket,) = client.tickets("actor-0", (0, 0), 1, [], 0.0).tickets
    for each in (*episode(1), sample(1)):
        assert client.turn(ticket.id, ticket.attempt, each) == "stored"
    client = again(client)
    client.identity = "actor-0"
    client.hello("actor")  # a new process under its name
    client.identity = "actor-1"
    (second,) = client.tickets("actor-1", (0, 0), 1, [], 0.0).tickets
    assert [r.named for r in second.turns] == ["answer -1", "intent 0", "answer 0", "intent 1"]
    assert client.turn(ticket.id, ticket.attempt, answer(1)) == "revoked"
    for each in (answer(1), sample(2, tokens=2, stop_reason="abort")):
        assert client.turn(second.id, second.attempt, each) == "stored"
    client.release("actor-1", [(second.id, second.attempt)])
    client = again(client)
    client.identity = "actor-2"
    (third,) = client.tickets("actor-2", (0, 0), 1, [], 0.0).tickets
    assert third.id == ticket.id
    assert third.turns[-1].form == "partial"
    with pytest.raises(BufferRefused, match="bad_turn"):
        client.turn(third.id, third.attempt, sample(3))
    carried = [r for r in third.turns if isinstance(r, RecordedSample) and not r.partial]
    assert client.turn(third.id, third.attempt, sample(2)) == "stored"
    made = played(third, [*carried, sample(2)], "actor-2")
    assert client.put(made) == "stored"
    assert client.put(made) == "duplicate"
    assert client.status()["turns"] == {"continued": 6, "longer": 1}


def test_the_whole_way_with_the_buffer_opened_again_between_its_parts(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"

    def open_again(before: InProcessBuffer | None = None) -> InProcessBuffer:
        if before is not None:
            before.close()
        return InProcessBuffer(rules(durable=True), FakeSource(), folder=folder)

    whole_way(open_again(), open_again)
    files = PayloadFiles(folder / "payloads")
    assert list(checked(read_ledger(folder), files.read)) == []
    files.close()


def test_what_an_audit_finds(tmp_path: Path) -> None:
    buffer = opened(tmp_path)
    one, two = issue(buffer, credits=2)
    record(buffer, one, episode(2))
    record(buffer, two, episode(1))
    put(buffer, played(one, [sample(0), sample(1)]))
    assert violations(buffer, tmp_path) == []
    files = PayloadFiles(tmp_path / "payloads")
    changes = {
        "is missing from the ledger": "UPDATE turns SET serial = serial + 10 WHERE serial = 7",
        "no such attempt was to record turns": "UPDATE turns SET attempt = 3 WHERE serial = 2",
        "cannot come where it is recorded": "UPDATE turns SET number = 5 WHERE serial = 3",
        "has 0 tokens of versions 0 to 0": "UPDATE turns SET sampled = 0 WHERE serial = 1",
        "has there (tokens, oldest, newest) (3, 0, 0)": "UPDATE turns SET sampled = 4 WHERE serial = 1",
        "other tokens in that turn": f"UPDATE turns SET tokens = '{'0' * 32}' WHERE serial = 1",
        "have another length or checksum": "UPDATE turns SET checksum = 1 WHERE serial = 6",
        "the ledger says (0, False, 'sample', 3, 0, 1": "UPDATE turns SET newest = 1 WHERE serial = 6",
        "is kept, and its ticket is not open": "UPDATE turns SET ended = NULL WHERE serial = 4",
        "was continued, and no trajectory": "UPDATE turns SET ended = 'continued' WHERE serial = 6",
        "nothing else in the ledger says so": "UPDATE turns SET ended = 'failed' WHERE serial = 6",
        "there is no such thing": "UPDATE turns SET ended = 'eaten' WHERE serial = 6",
    }
    buffer.database.close()
    for place, (said, change) in enumerate(changes.items()):
        copy = tmp_path / f"changed-{place}"
        copy.mkdir()
        shutil.copy(tmp_path / "ledger.sqlite", copy)
        with closing(sqlite3.connect(copy / "ledger.sqlite")) as db, db:
            assert db.execute(change).rowcount == 1
        found = list(checked(read_ledger(copy), files.read))
        assert any(said in each for each in found), (said, found)
    files.close()


@pytest.mark.timeout(240)
@pytest.mark.system
def test_the_whole_way_with_the_buffer_process_killed_between_its_parts(tmp_path: Path) -> None:
    process = BufferProcess(tmp_path / "run", buffer={**CONFIG["buffer"], "turns": "on"})
    process.start()

    def kill(_: Any) -> BufferClient:
        process.kill()
        process.start()
        return process.client()

    try:
        whole_way(process.client(), kill)
    finally:
        process.close()
    folder = process.run.buffer
    files = PayloadFiles(folder / "payloads")
    ledger = read_ledger(folder)
    assert list(checked(ledger, files.read)) == []
    assert [a.ended for a in ledger.attempts[0, 0]] == ["lapsed", "released", "stored"]
    files.close()


def with_large_snapshots(records: Sequence[Recorded]) -> list[Recorded]:
    return [replace(each, snapshot=bytes(20_000)) if isinstance(each, RecordedAnswer) else each for each in records]


def test_recorded_turns_leave_room_on_the_disk(tmp_path: Path) -> None:
    """They stop before early checkpoints are wanted and new groups refused; what is stored goes on."""
    most = 400_000
    buffer = opened(tmp_path, max_disk_bytes=most)
    first, second = issue(buffer, credits=2)
    large = with_large_snapshots(episode(30))
    said = []
    for each in large:
        said += record(buffer, first, [each])
        buffer.commit(0.0)
        if said[-1] == "full":
            break
    assert said.count("full") == 1
    assert 0.7 * most < buffer.database.payloads.disk_bytes <= ROOM_FOR_TURNS * most
    kept = len(said) - 1
    assert record(buffer, first, large[kept - 1 : kept]) == ["stored"], "a repeat of what is stored"
    assert record(buffer, second, [replace(RESET, snapshot=bytes(20_000))]) == ["full"]
    assert issue(buffer), "new groups are issued"
    # The attempts go on without, and what was stored is where the next one of the first goes on.
    assert put(buffer, played(second, [sample(n) for n in range(4)])) == "stored"
    buffer.joined("actor-0")
    (again, *_) = issue(buffer)
    assert (again.id, len(again.turns)) == (first.id, kept)
    assert put(buffer, played(again, [sample(n) for n in range(30)])) == "stored"
    assert counts(buffer) == {"continued": kept}
    assert violations(buffer, tmp_path) == []


def test_at_the_bound_of_the_disk_turns_that_wait_to_be_written_count(tmp_path: Path) -> None:
    buffer = opened(tmp_path, max_disk_bytes=400_000)
    (ticket,) = issue(buffer)
    large = with_large_snapshots(episode(30))
    said = record(buffer, ticket, [RESET])
    for each in large[1:]:  # all in one commit
        if said[-1] == "full":
            break
        said += record(buffer, ticket, [each])
    assert said[-1] == "full"
    buffer.commit(0.0)
    assert buffer.database.payloads.disk_bytes <= ROOM_FOR_TURNS * 400_000
