"""The real buffer process over real sockets: its answers, what it refuses, and what survives its death."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncrl.buffer.client import AsyncBufferClient, BufferClient, BufferRefused, BufferTimeout
from asyncrl.buffer.client.messages import Head
from asyncrl.buffer.record import to_record
from asyncrl.trajectory import Trajectory
from asyncrl.wire import pack, unpack
from tests.buffer.fakes import trajectory
from tests.buffer.fuzzing import malformed
from tests.buffer.processes import BufferProcess

Start = Callable[..., BufferProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[BufferProcess] = []

    def make(max_file_bytes: int | None = None, **sections: Any) -> BufferProcess:
        started.append(BufferProcess(tmp_path / f"run-{len(started)}", **sections))
        started[-1].start(max_file_bytes)
        return started[-1]

    yield make
    for process in started:
        process.close()


def play(client: BufferClient, version: int = 0, credits: int = 8, wait_s: float = 5.0) -> list[Trajectory]:
    reply = client.tickets("actor-0", (0, version), credits, [], wait_s)
    made = [trajectory(ticket, (version,), float(ticket.id.index)) for ticket in reply.tickets]
    assert [client.put(t) for t in made] == ["stored"] * len(made)
    return made


def test_a_run_from_the_first_ticket_to_the_end(start: Start, tmp_path: Path) -> None:
    buffer = start()
    learner, incarnation = buffer.learner()
    actor = buffer.client("actor-0")
    assert actor.hello("actor") == Head(branch=0, version=0, published=0)
    learner.evaluate((0, 0))
    held_out = actor.tickets("actor-0", (0, 0), 9, [], 1.0).tickets
    assert [t.kind for t in held_out] == ["eval", "eval"]
    for ticket in held_out:
        actor.put(trajectory(ticket, (0,)))
    results = learner.evaluation(everyone=True)
    assert (results.done, results.sets[0].measures["sampled"].share) == (True, 1.0)
    for version in range(3):
        made = {t.digest(): t for t in play(actor, version)}
        reply = learner.batch(incarnation, version, 0, 1, 5.0)
        assert (reply.state, reply.version, reply.branch, len(reply.groups)) == ("ready", version, 0, 2)
        assert [t.digest() for t in reply.trajectories] == list(reply.digests)
        assert reply.weights == (1.0,) * 4
        assert version or set(reply.digests) <= set(made)
        again = learner.batch(incarnation, version, 1, 2, 5.0)
        assert (again.groups, len(again.trajectories)) == (reply.groups, 2)
        assert learner.finished(incarnation, version, "applied") == version + 1
        learner.published(incarnation, 0, version + 1, f"digest-{version + 1}")
    folder = buffer.run.checkpoints / "step-3"
    folder.mkdir()
    for wrong in (tmp_path, buffer.run.checkpoints, "", "step-3", f"{folder}/../../..", "a\0b"):
        with pytest.raises(BufferRefused, match="bad_checkpoint"):
            learner.checkpointed(incarnation, 3, 3, str(wrong))
    learner.checkpointed(incarnation, 3, 3, str(folder))
    assert (folder / "buffer" / "ledger.sqlite").is_file()
    status = actor.status()
    assert status["equation"]["0"]["trained"] == 6
    assert status["version"] == 3
    learner.stop()
    assert buffer.process is not None
    assert buffer.process.wait(60) == 0


def test_a_start_sent_again_while_the_buffer_comes_up_is_one_incarnation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the learner would be fenced off by repeats of its own request, and each would count as a death."""
    monkeypatch.setattr("asyncrl.buffer.client.retry.RESEND_S", (0.02, 0.02))
    buffer = BufferProcess(tmp_path / "run")
    started: list[Any] = []
    learner = buffer.client("learner")
    asking = threading.Thread(target=lambda: started.append(learner.start(0, 0, None)))
    try:
        asking.start()
        time.sleep(0.5)
        buffer.start()
        asking.join(60)
        assert started[0].incarnation == 1
        assert learner.status()["incarnation"] == 1
        learner.published(1, 0, 0, "digest-0")
        assert learner.batch(1, 0, 0, 1, 0.0).state == "waiting"
        assert learner.start(0, 0, None).incarnation == 2
    finally:
        buffer.close()
        asking.join(60)


def test_requests_are_held_until_there_is_an_answer(start: Start) -> None:
    buffer = start()
    learner, incarnation = buffer.learner()
    actor, other = buffer.client("actor-0"), buffer.client("actor-1")
    begun = time.monotonic()
    reply = learner.batch(incarnation, 0, 0, 1, 0.3)
    assert 0.3 <= time.monotonic() - begun < 20
    assert reply.state == "waiting"
    assert reply.why.startswith("0 of 2 groups are complete")
    tickets = actor.tickets("actor-0", (0, 0), 8, [], 1.0).tickets
    assert "admission" in other.tickets("actor-1", (0, 0), 1, [], 0.1).why

    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(learner.batch(incarnation, 0, 0, 1, 20.0)))
    asking.start()
    time.sleep(0.3)
    for ticket in tickets[:4]:
        actor.put(trajectory(ticket))
    asking.join(60)
    assert found[0].state == "ready"
    # Finishing the batch admits new groups: the waiting actor is answered without asking again.
    waiting: list[Any] = []
    asking = threading.Thread(target=lambda: waiting.append(other.tickets("actor-1", (0, 1), 2, [], 20.0)))
    asking.start()
    time.sleep(0.2)
    learner.finished(incarnation, 0, "applied")
    learner.published(incarnation, 0, 1, "digest-1")
    asking.join(60)
    assert len(waiting[0].tickets) == 2
    assert actor.renew("actor-0", [(t.id, t.attempt) for t in tickets]) == [(t.id, 0) for t in tickets[:4]]


def test_malformed_messages_are_refused_and_counted(start: Start) -> None:
    buffer = start()
    _, incarnation = buffer.learner()
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(buffer.address)
    good = {"n": 1, "who": "x", "wait_s": 0.0}
    ticket = {"id": [0, 0, 0], "attempt": 0}
    messages: list[list[bytes]] = [
        [b"\xff\xff"],
        [b""],
        [b"x" * 100_000],
        [pack({"op": "status"})],
        [pack({"op": "nothing", "n": 1})],
        [pack({"op": ["status"], "n": 1})],
        [pack({"op": "status", "n": -5})],
        [pack({"op": "status", "n": 2**63})],
        [pack({"op": "put"} | good)],
        [pack({"op": "put"} | good), b"", b""],
        [pack({"op": "put"} | good), b"\0" * 64],
        [pack({"op": "put"} | good), to_record(trajectory_without_ticket())[:-8]],
        [pack({"op": "tickets", "actor": "a", "held": [0], "credits": 1, "leased": []} | good)],
        [pack({"op": "tickets", "actor": "a", "held": [0, 0], "credits": -1, "leased": []} | good)],
        [pack({"op": "tickets", "actor": "a", "held": [0, 0], "credits": 1, "leased": [1]} | good)],
        [pack({"op": "tickets", "actor": 7, "held": [0, 0], "credits": 1, "leased": []} | good)],
        [pack({"op": "tickets", "actor": "a", "held": [0, 0], "credits": 1, "leased": [[ticket, 0]]} | good)],
        [pack({"op": "batch", "incarnation": incarnation, "b": 0, "dp_rank": 1, "dp_size": 1} | good)],
        [pack({"op": "batch", "incarnation": incarnation, "b": 0, "dp_rank": 0, "dp_size": 0} | good)],
        [pack({"op": "batch", "incarnation": "x", "b": 0, "dp_rank": 0, "dp_size": 1} | good)],
        [pack({"op": "batch", "incarnation": incarnation, "b": 0.5, "dp_rank": 0, "dp_size": 1} | good)],
        [pack({"op": "start", "batch": 0, "version": 0, "branch": "main"} | good)],
        [pack({"op": "start", "batch": 0, "version": 0, "branch": None, "fresh": 1} | good)],
        [pack({"op": "finished", "incarnation": incarnation, "b": 0, "outcome": "poison"} | good)],
        [pack({"op": "fail", "id": [0, 0], "attempt": 0, "reason": "", "detail": ""} | good)],
        [pack({"op": "fail", **ticket, "reason": "x" * 5000, "detail": ""} | good)],
        [pack({"op": "renew", "actor": "a", "leases": {}} | good)],
        [pack({"op": "checkpointed", "incarnation": incarnation, "version": 0, "batch": 0, "path": 3} | good)],
        [pack({"op": "evaluate", "version": [0, True]} | good)],
        [pack({"op": "hello", "role": "actor", "n": 1})],
    ]
    for frames in messages:
        raw.send_multipart(frames)
        assert raw.poll(20_000), frames
        reply = unpack(raw.recv_multipart()[0])
        assert malformed(reply) == max(1, len(frames) - 1), (frames, reply)
    rng = random.Random(0)
    for _ in range(300):
        raw.send_multipart([rng.randbytes(rng.randint(0, 60)) for _ in range(rng.randint(1, 4))])
    raw.close()
    status = buffer.client().status()
    assert status["service"]["refused"] >= len(messages)
    assert status["equation"]["0"] == {"issued": 0}


def trajectory_without_ticket() -> Trajectory:
    from asyncrl.trajectory import TicketId

    return trajectory(TicketId(0, 0, 0))


def test_refusals_name_their_code(start: Start) -> None:
    buffer = start()
    learner, incarnation = buffer.learner()
    buffer.learner()
    for ask, code in (
        (lambda: learner.batch(incarnation, 0, 0, 1, 0.0), "stale_incarnation"),
        (lambda: learner.finished(incarnation + 1, 0, "applied"), "not_fixed"),
        (lambda: learner.published(incarnation + 1, 3, 0, "d"), "stale_branch"),
        (lambda: learner.start(5, 5, 0), "unknown_checkpoint"),
        (lambda: learner.put(trajectory_without_ticket()), "unknown_ticket"),
        (lambda: learner.checkpointed(incarnation + 1, 0, 0, "/nowhere"), "bad_checkpoint"),
        (lambda: learner.evaluate((0, 7)), "not_published"),
    ):
        with pytest.raises(BufferRefused) as refused:
            ask()
        assert refused.value.code == code


def test_no_answer_is_a_timeout_that_says_who_and_how_long(tmp_path: Path) -> None:
    client = BufferClient(f"ipc://{tmp_path}/nobody.sock", identity="x", deadline_s=0.3)
    begun = time.monotonic()
    with pytest.raises(BufferTimeout, match=r"nobody\.sock did not answer status within 0\.3"):
        client.status()
    assert time.monotonic() - begun < 30
    client.close()


def test_a_peer_that_never_reads_costs_nobody_else(start: Start) -> None:
    buffer = start()
    client = buffer.client()
    client.status()
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.LINGER, 0)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.SNDHWM, 0)
    deaf.connect(buffer.address)
    for n in range(6000):
        deaf.send(pack({"op": "status", "n": n}))
    deadline = time.monotonic() + 30
    while not client.status()["service"].get("undelivered"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    deaf.close()
    context.term()
    assert client.status()["service"]["undelivered"] > 0


@pytest.mark.system
def test_a_full_disk_ends_the_run_and_nothing_acknowledged_is_lost(start: Start) -> None:
    buffer = start(max_file_bytes=600_000, learner={"groups_per_step": 16}, env={"max_tokens": 6000})
    buffer.learner()
    actor = buffer.client("actor-0", deadline_s=8.0)
    acknowledged = []
    tickets = actor.tickets("actor-0", (0, 0), 64, [], 5.0).tickets
    full = False
    for ticket in tickets:
        made = trajectory(ticket, (0,), tokens=5000)
        try:
            acknowledged.append((made, actor.put(made)))
        except BufferTimeout:
            full = True
            break
    assert full
    assert len(acknowledged) > 2
    assert buffer.process is not None
    assert buffer.process.wait(60) == 3
    assert "the ledger" in buffer.log.read_text()
    assert "--resume" in buffer.log.read_text()
    buffer.start()
    again = buffer.client()
    assert {again.put(made) for made, _ in acknowledged} == {"duplicate"}


@pytest.mark.system
def test_a_second_buffer_on_the_same_run_ends_with_one_sentence(start: Start, tmp_path: Path) -> None:
    buffer = start()
    buffer.client().status()
    second = BufferProcess.__new__(BufferProcess)
    second.run, second.address, second.log, second.clients = buffer.run, buffer.address, tmp_path / "second.log", []
    second.start()
    assert second.process is not None
    assert second.process.wait(60) == 3
    assert "in use by another buffer process" in second.log.read_text()
    assert buffer.client().status()["version"] == 0


def test_who_kills_a_learner_on_purpose_says_so_first_and_no_batch_is_suspected(start: Start) -> None:
    buffer = start(learner={"groups_per_step": 2, "group_size": 2, "steps": 1000, "batch_retries": 2})
    learner, incarnation = buffer.learner()
    play(buffer.client("actor-0"))
    launcher = buffer.client("launcher")
    for _ in range(4):
        assert learner.batch(incarnation, 0, 0, 1, 5.0).state == "ready"
        launcher.caused()
        incarnation = learner.start(0, 0, None).incarnation
    assert learner.batch(incarnation, 0, 0, 1, 5.0).state == "ready"


def test_sigterm_ends_it_in_order_and_the_learner_was_stopped_on_purpose(start: Start) -> None:
    buffer = start()
    learner, incarnation = buffer.learner()
    play(buffer.client("actor-0"))
    assert learner.batch(incarnation, 0, 0, 1, 5.0).state == "ready"
    assert buffer.process is not None
    buffer.process.send_signal(signal.SIGTERM)
    assert buffer.process.wait(60) == 0
    with sqlite3.connect(buffer.run.buffer / "ledger.sqlite") as db:
        assert db.execute("SELECT holds, caused FROM incarnations").fetchall() == [(0, 1)]
    db.close()


def kill_at_random(buffer: BufferProcess, kills: int, seed: int) -> None:
    """An actor and a learner work on while the buffer dies again and again; then everything is accounted for."""
    rng = random.Random(seed)
    acknowledged: dict[tuple[int, int], str] = {}
    trained: dict[int, tuple[int, ...]] = {}
    failures: list[BaseException] = []
    done = threading.Event()

    async def work() -> None:
        actor = AsyncBufferClient(buffer.address, identity="actor-0", deadline_s=240)
        learner = BufferClient(buffer.address, identity="learner", deadline_s=240)
        in_thread = asyncio.to_thread
        started = await in_thread(learner.start, 0, 0, None)
        await in_thread(learner.published, started.incarnation, 0, 0, "digest-0")
        b = 0

        async def put(ticket: Any) -> None:
            made = trajectory(ticket, (ticket.min_version[1],), float(ticket.id.index), tokens=200)
            await asyncio.sleep(rng.random() * 0.02)
            outcome = await actor.put(made)
            assert outcome in ("stored", "duplicate"), outcome
            acknowledged[ticket.id.group, ticket.id.index] = made.digest()

        while not done.is_set():
            reply = await actor.tickets("actor-0", (0, b), 8, [], 0.05)
            await asyncio.gather(*[put(ticket) for ticket in reply.tickets])
            batch = await in_thread(learner.batch, started.incarnation, b, 0, 1, 0.05)
            if batch.state == "ready":
                trained[b] = batch.groups
                assert set(batch.digests) == {acknowledged[g, i] for g in batch.groups for i in range(2)}
                assert await in_thread(learner.finished, started.incarnation, b, "applied") == b + 1
                b += 1
                await in_thread(learner.published, started.incarnation, 0, b, f"digest-{b}")
        await actor.close()
        learner.close()

    def run() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:  # handed to the test's own thread, which raises it
            failures.append(error)

    working = threading.Thread(target=run)
    working.start()
    try:
        for _ in range(kills):
            buffer.client(deadline_s=180).hello("test")
            buffer.clients.pop().close()
            time.sleep(rng.random() * 0.4)
            buffer.kill()
            buffer.start()
        buffer.client(deadline_s=180).hello("test")
        until = time.monotonic() + 120
        while len(trained) <= 2 and not failures and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        done.set()
        working.join(90)
    assert not failures, failures[0]
    assert not working.is_alive()
    buffer.kill()
    with sqlite3.connect(buffer.run.buffer / "ledger.sqlite") as db:
        stored = {(g, i): digest for g, i, digest in db.execute("SELECT grp, idx, digest FROM trajectories")}
        assert {key: stored.get(key) for key in acknowledged} == acknowledged
        line: dict[int, list[int]] = {}
        for b, group in db.execute("SELECT b, grp FROM uses JOIN batches USING (serial) ORDER BY serial, place"):
            line.setdefault(b, []).append(group)
        assert {b: tuple(line[b]) for b in trained} == trained
        flat = [group for groups in line.values() for group in groups]
        assert len(flat) == len(set(flat))
        numbers, draws = zip(*db.execute("SELECT number, draw FROM groups ORDER BY number"), strict=True)
        assert numbers == draws == tuple(range(len(numbers)))
    db.close()
    assert len(trained) > 2


def test_kill_at_random_moments_loses_nothing(start: Start) -> None:
    kill_at_random(start(), kills=3, seed=os.getpid())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills_lose_nothing(start: Start) -> None:
    kill_at_random(start(), kills=200, seed=1)
