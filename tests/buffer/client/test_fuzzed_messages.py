"""Twenty thousand damaged messages to each that takes bytes from a socket: refused and counted, or taken for what they
say; nothing else. The slow test sends a million to a real buffer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import psutil
import pytest
import torch
import zmq

from asyncrl.buffer.client import BufferRefused, codec, messages
from asyncrl.buffer.loop import Service
from asyncrl.buffer.record import from_record, to_record
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.collector import Collector
from asyncrl.trajectory import Span, Ticket, TicketId, Trajectory, TurnRecord, TurnReward
from asyncrl.weights.device.publisher import DevicePublisher
from asyncrl.weights.device.subscriber import DeviceSubscriber
from asyncrl.weights.device.transports import Mapped
from asyncrl.weights.local.shm import ShmPublisher
from asyncrl.weights.network import source
from asyncrl.weights.network.server import WeightsServer
from asyncrl.weights.protocol import WeightsCorrupt
from asyncrl.wire import WireError, decode_trajectory, encode_trajectory, pack, unpack
from asyncrl.wire.turns import encode_turn
from tests.buffer.fakes import open_buffer, trajectory
from tests.buffer.fuzzing import malformed, mutations
from tests.buffer.processes import CONFIG, BufferProcess
from tests.buffer.tickets.test_turns import RESET, answer, sample

MANY = 20_000


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


def two_turns(id: TicketId, *versions: int) -> Trajectory:
    """The last tokens are the second turn's; the record has everything that it may have."""
    made = trajectory(id, versions)
    rest = len(versions) - 1
    turn_rewards = (
        TurnReward(0.25, (Span(0, 2, 1),), b"hall", {"found": 0.5}),
        TurnReward(0.75, (Span(0, 3, rest),), None, {"found": 0.0}),
    )
    records = (TurnRecord(0.1, 1.0, 0.5, 2, 1), TurnRecord(None, 1.0, None, 0, rest))
    return replace(made, turns=2, turn_rewards=turn_rewards, turn_records=records)


def requests(folder: Path) -> list[list[bytes]]:
    """One good request of each kind that changes no more than a ticket."""
    who = {"n": 1, "who": "actor-0", "wait_s": 0.0}
    ticket = {"branch": 0, "group": 0, "index": 0}
    record = bytes(to_record(two_turns(TicketId(0, 0, 0), 0, 0, 0)))
    headers = [
        {"op": "hello", "role": "actor"},
        {"op": "tickets", "actor": "actor-0", "held": [0, 0], "credits": 1, "leased": [[ticket, 0]]},
        {"op": "renew", "actor": "actor-0", "leases": [[ticket, 0]]},
        {"op": "fail", "id": ticket, "attempt": 0, "reason": "env_error", "detail": "x"},
        {"op": "release", "actor": "actor-0", "leases": [[ticket, 0]]},
        {"op": "batch", "incarnation": 1, "b": 0, "dp_rank": 0, "dp_size": 1},
        {"op": "finished", "incarnation": 1, "b": 0, "outcome": "applied"},
        {"op": "published", "incarnation": 1, "branch": 0, "version": 0, "digest": "d"},
        {"op": "checkpointed", "incarnation": 1, "version": 0, "batch": 0, "path": str(folder / "nowhere")},
        {"op": "evaluate", "version": [0, 0]},
        {"op": "evaluation", "everyone": True, "lost": [0, 0]},
        {"op": "status"},
    ]
    id = TicketId(0, 0, 0)
    played = (RESET, sample(0), answer(0), sample(1, stop_reason="abort"))
    replies = (sample(0, summary=True), sample(1, summary=True, beside=1))  # of an agent
    turns = [encode_turn(id, 0, each) for each in (*played, *replies)]
    puts = [[pack({"op": "put"} | who), record]] * 6 + [[pack({"op": "turn", "actor": "actor-0"} | who), *turns]] * 3
    return [[pack(header | who)] for header in headers] + puts


def test_trajectories_records_and_tickets() -> None:
    made = two_turns(TicketId(0, 1, 2), 1, 2, 3)
    frames = [bytes(frame) for frame in encode_trajectory(made)]
    record = bytes(to_record(made))
    refused = 0
    for bad in mutations([frames], MANY // 2, seed=1):
        try:
            back = decode_trajectory(bad)
            assert back.oldest_version >= 0
        except WireError:
            refused += 1
    for bad in mutations([[record]], MANY // 2, seed=2):
        try:
            from_record(bad[0])
        except WireError:
            refused += 1
    assert MANY // 2 < refused < MANY
    asked = messages.TicketsRequest("actor-0", (0, 0), 1, (), 0.0)
    ticket = Ticket(TicketId(0, 1, 2), 0, "train", {"id": "t"}, (0, 0), 2, 1.0, 1, 30.0)
    for bad in mutations([[codec.encode_reply(1, messages.TicketReply([ticket], ""))]], 1000, seed=3):
        with contextlib.suppress(WireError, BufferRefused):
            codec.decode_reply(asked, codec.decode_header(bad[0]), [])


def test_batches_with_demonstrations() -> None:
    records = [bytes(to_record(trajectory(TicketId(0, 1, index)))) for index in range(2)]
    chats = [b'{"messages":[{"role":"assistant","content":"3"}],"tools":[]}'] * 2
    shown = tuple(messages.Demonstration(draw, "chats.jsonl line 1", "ab" * 16) for draw in range(2))
    reply = messages.BatchReply(
        "ready", "", [], (1.0, 1.0), ("d0", "d1"), (1,), (), 0, 0, None, False, False, demonstrations=shown
    )
    asked = messages.BatchRequest(1, 0, 0, 1, 0.0)
    good = [codec.encode_reply(1, reply), *records, *chats]
    back = codec.decode_reply(asked, codec.decode_header(good[0]), good[1:])
    assert [each.chat for each in back.demonstrations] == chats
    assert (len(back.trajectories), [each.draw for each in back.demonstrations]) == (2, [0, 1])
    refused = 0
    for bad in mutations([good], MANY, seed=7):
        try:
            back = codec.decode_reply(asked, codec.decode_header(bad[0]), bad[1:])
            assert len(back.trajectories) == len(back.digests)
            assert all(isinstance(each.chat, bytes) for each in back.demonstrations)
        except (WireError, BufferRefused):
            refused += 1
    assert MANY // 4 < refused < MANY


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    buffer = open_buffer(tmp_path / "buffer", durable=True)
    buffer.start(0, 0, None)
    made = Service(buffer, f"ipc://{tmp_path}/s", 0.0, checkpoints=tmp_path / "checkpoints")
    yield made
    made.close()
    buffer.database.close()


def test_requests_to_the_buffer(service: Service, tmp_path: Path) -> None:
    answers = refused = 0
    for bad in mutations(requests(tmp_path), MANY, seed=4):
        service._handle(b"peer", bad)
        for _, frames in service.outbox.replies:
            said = unpack(frames[0])
            answers += 1
            refused += malformed(said)
        service.outbox.replies.clear()
    assert answers > MANY / 2
    assert service.counts["refused"] == refused > MANY / 4


def test_reports_to_the_launcher(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    collector = Collector(run, run.load_config())
    common = {
        "pid": 1,
        "t": 1.0,
        "waits": {"batch": 1.0},
        "cause": None,
        "on": "",
        "since": 1.0,
        "lost": 0,
        "unknown": 0,
    }
    good = [
        {"role": "learner", "kind": "ready"},
        {"role": "learner", "kind": "waiting", "cause": "batch", "on": "buffer"},
        {
            "role": "learner",
            "kind": "metrics",
            "values": {"weights/loss": 1.0, "throughput/episodes": 3.0},
            "step": None,
        },
        {"role": "actor-0", "kind": "event", "event": "published", "fields": {"step": 1}},
    ]
    frames = [[bytes(msgpack.packb(common | each))] for each in good]
    sender = zmq.Context.instance().socket(zmq.PUSH)
    sender.setsockopt(zmq.SNDHWM, MANY)
    sender.connect(str(run.address("launcher")))
    for i, bad in enumerate(mutations(frames, MANY, seed=5)):
        sender.send(bad[0])
        if i % 500 == 499:
            collector.poll(0.0)
    sender.send(frames[0][0])
    deadline = time.monotonic() + 60
    while "learner" not in collector.ready and time.monotonic() < deadline:
        collector.poll(0.05)
    assert "learner" in collector.ready
    assert MANY / 4 < collector.malformed < MANY
    assert len(collector.state.roles) < 2000
    sender.close(0)
    collector.close({})
    run.remove_temporary()


def test_requests_to_the_weights_server_and_its_answers(tmp_path: Path) -> None:
    id = ShmPublisher(tmp_path / "w").publish(0, 0, [])
    server = WeightsServer(tmp_path / "w", f"ipc://{tmp_path}/s", 0)
    while server.latest is None:  # a thread looks at what changed
        server.turn()
    name = f"0-0-{id.digest}"
    good = [
        [pack({"op": "latest", "n": 1, "held": [-1, -1, ""], "kept": [0, 0, "d"], "full": False, "wait_s": 0})],
        [pack({"op": "join", "n": 1, "relay": "ipc://a", "lost": ""})],
        [pack({"op": "chunk", "n": 1, "payload": name, "offset": 0, "length": 8})],
    ]
    for bad in mutations(good, MANY // 2, seed=6):
        server._handle([b"peer", *bad])
    assert MANY / 8 < server.counts["refused"] < MANY / 2
    assert server.counts["chunks"] > 0
    server.close()
    offer = {"payload": name, "id": [0, 0, id.digest], "bytes": 100, "base": "", "sum": ""}
    for bad in mutations([[pack({"ok": True, **offer, "pinned": offer})]], MANY // 2, seed=7):
        with contextlib.suppress(WireError):
            source._offers(unpack(bad[0]))


def test_requests_for_weights_on_a_gpu_and_their_answers(tmp_path: Path) -> None:
    address, cpu = f"ipc://{tmp_path}/d", torch.device("cpu")
    learner = DevicePublisher(address, Mapped(lambda chunk: {"bytes": len(chunk)}), cpu)
    learner.publish(0, 0, [("w", torch.ones(3)), ("b", torch.ones(2, 2).bfloat16())])
    actor = DeviceSubscriber(address, "actor-0", lambda: cpu)
    said, layout = actor.client.ask("lease")
    learner._stop.set()
    learner._thread.join(5)
    answers: list[tuple[object, ...]] = []
    learner._answer = lambda *a: answers.append(a)  # type: ignore[method-assign]
    who = {"n": 1, "reader": "actor-0"}
    good = [
        [pack(who | {"op": "latest", "held": [-1, -1, ""], "wait_s": 0.0})],
        [pack(who | {"op": "lease"})],
        [pack(who | {"op": "release"})],
        [pack(who | {"op": "join", "ranks": 0})],
        [pack(who | {"op": "send"})],
    ]
    for bad in mutations(good, MANY // 2, seed=8):
        learner._handle([b"peer", *bad])
    assert len(answers) > MANY / 8
    refused = 0
    for bad in mutations([[pack(said), layout]], MANY // 2, seed=9):
        header, body = (*bad, b"")[:2]
        actor.client.ask = lambda *_, h=header, b=body, **__: (unpack(h), b)  # type: ignore[method-assign, misc]
        try:
            opened = actor.open()
            assert (opened.id.digest, len(opened.layout.entries)) == (said["id"][2], 2)
        except (WireError, WeightsCorrupt):
            refused += 1
    assert refused > MANY / 8
    actor.close()
    learner.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_million_to_a_real_buffer_which_lives_and_does_not_grow(tmp_path: Path) -> None:
    buffer = BufferProcess(tmp_path / "run", buffer={**CONFIG["buffer"], "turns": "on"})
    buffer.start()
    try:
        learner, _ = buffer.learner()
        assert buffer.process is not None
        process = psutil.Process(buffer.process.pid)
        raw = zmq.Context.instance().socket(zmq.DEALER)
        raw.setsockopt(zmq.SNDHWM, 0)
        raw.connect(buffer.address)
        sizes, refused, sent = [], 0, 0
        for i, bad in enumerate(mutations(requests(tmp_path), 1_000_000, seed=8)):
            raw.send_multipart(bad)
            sent += 1
            if i % 2000 == 1999:
                while raw.poll(0 if i % 20_000 != 19_999 else 500):
                    refused += malformed(unpack(raw.recv_multipart()[0]))
                if i % 100_000 == 99_999:
                    sizes.append(process.memory_info().rss)
                    assert process.status() != psutil.STATUS_ZOMBIE, buffer.log.read_text()[-2000:]
                    assert learner.status()["version"] >= 0, "alive"
        while raw.poll(3000):
            refused += malformed(unpack(raw.recv_multipart()[0]))
        print(f"{sent} sent, {refused} refused as malformed, resident MB {[s >> 20 for s in sizes]}")
        assert refused > 200_000
        assert sizes[-1] < 1.2 * sizes[1], "memory is flat once it is warm"
        raw.close(0)
    finally:
        buffer.close()
