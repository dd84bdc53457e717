"""A version on its way to another host that is lost, altered or damaged, and peers that say what is not understood."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncrl.sockets import Link
from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber
from asyncrl.weights.network import delta
from asyncrl.weights.network.mirror import Mirror
from asyncrl.weights.network.server import AGAIN_S, WeightsServer
from asyncrl.weights.protocol import WeightsVersion
from asyncrl.wire import pack, unpack
from tests.weights.network.mirror_stage import WAIT_S, Place, holds, model, same, until


class Between:
    """A network between server and mirror that does what it is told to each answer. A stand-in for a bad one."""

    def __init__(self, path: Path, to: str, do: Callable[[list[bytes]], list[bytes] | None]) -> None:
        self.address, self._do, self._to = f"ipc://{path}/between", do, to
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        context = zmq.Context()
        near, far = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        near.bind(self.address)
        far.connect(self._to)
        peer = b""
        while not self._stop.is_set():
            if near.poll(5):
                peer, request = near.recv_multipart()
                far.send(request)
            if far.poll(5) and (answer := self._do(far.recv_multipart())) is not None:
                near.send_multipart([peer, *answer])
        context.destroy(linger=0)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)


def through(place: Place, do: Callable[[list[bytes]], list[bytes] | None]) -> Mirror:
    between = Between(place.path, place.address, do)
    place.closing.append(between)
    place.address = between.address
    return place.host(answer_s=0.3)


def test_lost_and_altered_chunks_are_asked_for_again_and_nothing_else(place: Place) -> None:
    place.serve()
    n, chunks = 4_000_000, 0

    def bad(frames: list[bytes]) -> list[bytes] | None:
        nonlocal chunks
        header, data = frames
        if "offset" not in unpack(header):
            return frames
        chunks += 1
        if chunks % 5 == 2:
            return None
        if chunks % 5 == 4:
            return [header, data[:-1] + bytes([data[-1] ^ 1])]
        return frames

    host = through(place, bad)
    id = place.publish(1, n=n)
    assert holds(host, id)
    assert same(host, 1, n=n)
    assert host.counts["bad_chunks"] >= 1
    assert host.counts["again"] >= 1
    assert host.counts["received_bytes"] < 2.1 * n, "what was there was kept"
    assert host.counts["full"] == 1


def test_a_delta_that_lies_is_thrown_away_and_the_whole_file_asked_for(place: Place) -> None:
    """Sums of the chunks agree: somebody made other bytes on purpose, or there is a bug."""
    import xxhash

    place.serve()
    lies = 0

    def lie(frames: list[bytes]) -> list[bytes] | None:
        nonlocal lies
        header = unpack(frames[0])
        if "<" not in str(header.get("payload")) or "offset" not in header:
            return frames
        lies += 1
        data = frames[1][:-1] + bytes([frames[1][-1] ^ 1])
        return [pack(header | {"sum": xxhash.xxh3_64_intdigest(data)}), data]

    host = through(place, lie)
    assert holds(host, place.publish(0))
    seen: list[WeightsVersion] = []
    id = place.publish(1)
    while not seen or seen[-1] != id:
        latest = ShmSubscriber(host.dir).latest()
        assert latest is not None
        if not seen or seen[-1] != latest:
            seen.append(latest)
            assert same(host, latest.version), "never anything but a version that was published"
        time.sleep(0.005)
    assert lies
    assert (host.counts["corrupt"], host.counts["full"], host.counts["delta"]) == (1, 2, 0)


def test_a_source_file_that_is_damaged_is_not_served_to_actors(place: Place) -> None:
    place.serve()
    host = place.host()
    good = place.publish(0)
    assert holds(host, good)
    file = place.path / "source" / "000000-0000000001.weights"
    other = ShmPublisher(place.path / "elsewhere").publish(0, 1, model(7).items())
    data = bytearray((place.path / "elsewhere" / file.name).read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    pointer = (place.path / "elsewhere" / "latest.json").read_text()
    (place.path / "source" / "latest.json").write_text(pointer)
    assert until(lambda: host.counts["corrupt"] >= 2)
    assert ShmSubscriber(host.dir).latest() == good
    assert other.version == 1
    assert holds(host, place.publish(2))


def test_a_damaged_file_is_told_once_and_the_next_version_is_served(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.publish(0)
    path = place.path / "source" / "000000-0000000000.weights"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    now = [0.0]
    server = WeightsServer(place.path / "source", place.address, 0, clock=lambda: now[0])
    try:
        for turn in range(30):
            now[0] = turn * AGAIN_S / 3
            server.turn()
        assert len([r for r in caplog.records if "not served" in r.message]) == 1
        assert server.latest is None
        id = place.publish(1)

        def served() -> bool:
            now[0] += AGAIN_S
            server.turn()
            return server.latest == id

        assert until(served)
    finally:
        server.close()


def test_chunks_are_served_while_a_delta_is_made(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, begun = threading.Event(), threading.Event()
    make = delta.make

    def slow(*args: Any) -> bytes | None:
        begun.set()
        assert may_end.wait(WAIT_S)
        return make(*args)

    monkeypatch.setattr(delta, "make", slow)
    serving = place.serve()
    host = place.host()
    first, second = place.publish(0), None
    assert holds(host, first)
    second = place.publish(1)
    assert begun.wait(WAIT_S)
    late = place.host("late")
    assert holds(late, first), "the version before is served meanwhile"
    assert serving.server.latest == first
    may_end.set()
    assert holds(late, second)
    assert same(late, 1)
    assert late.counts["delta"] == 1


def test_the_server_refuses_what_it_does_not_understand(place: Place) -> None:
    serving = place.serve()
    id = place.publish(0)
    assert until(lambda: serving.server.latest == id)
    raw: Link[zmq.Socket[bytes]] = Link(zmq.Context.instance(), zmq.DEALER, place.address)
    good = {"op": "latest", "n": 1, "held": [-1, -1, ""], "full": False, "wait_s": 0}
    bad: list[bytes] = [b"", b"\xff", pack({}), pack({"op": "chunk"}), pack({"op": 3, "n": 2**64 - 1})]
    bad += [pack(good | {"held": x}) for x in ([], [1, 2], [1, 2, 3], "x", None, [True, 0, ""])]
    bad += [pack(good | {"wait_s": x}) for x in (-1, "1", float("nan"), float("inf"), None)]
    bad += [pack(good | {"full": 1}), pack(good | {"kept": None}), pack(good | {"kept": [0, 0, 0]})]
    bad += [pack({"op": "join", "n": 1} | x) for x in ({}, {"relay": "", "lost": ""}, {"relay": "a", "lost": 1})]
    for frame in bad:
        raw.socket.send(frame)
        assert raw.socket.poll(20_000)
        assert unpack(raw.socket.recv_multipart()[0])["code"] == "malformed"
    assert serving.server.counts["refused"] == len(bad)
    raw.socket.send(pack(good))
    assert raw.socket.poll(20_000)
    offer = unpack(raw.socket.recv_multipart()[0])
    chunk = {"op": "chunk", "n": 3, "payload": offer["payload"], "offset": 0, "length": 10}
    for wrong in ({"offset": -1}, {"offset": offer["bytes"]}, {"length": 0}, {"length": 1 << 30}, {"offset": 0.5}):
        raw.socket.send(pack(chunk | wrong))
        assert raw.socket.poll(20_000)
        assert unpack(raw.socket.recv_multipart()[0])["code"] == "malformed"
    raw.socket.send(pack(chunk | {"payload": "x"}))
    assert raw.socket.poll(20_000)
    assert unpack(raw.socket.recv_multipart()[0])["code"] == "gone"
    raw.close()
