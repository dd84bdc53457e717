"""A version on its way to another host, over real sockets: whole, as a delta, after silence, after damage."""

from __future__ import annotations

import doctest
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import Endpoint, Link
from asyncrl.weights import delta, tree
from asyncrl.weights import mirror as mirror_module
from asyncrl.weights.mirror import Mirror
from asyncrl.weights.mirrored import MirroredSubscriber
from asyncrl.weights.protocol import WeightsVersion
from asyncrl.weights.server import AGAIN_S, Server
from asyncrl.weights.shm import ShmPublisher, ShmSubscriber
from asyncrl.wire import pack, unpack

WAIT_S = 20.0


def model(version: int, n: int = 300_000) -> dict[str, torch.Tensor]:
    """Each version differs from the one before in few elements."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(n, generator=g).bfloat16()
    w[: 10 * version] += 1
    return {"w": w, "b": torch.full((3,), float(version))}


def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Serving:
    """A server in a thread of its own."""

    def __init__(self, folder: Path, where: Endpoint | str, full_every: int = 0, fanout: int = 0) -> None:
        self.server = Server(folder, where, full_every, fanout)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stop.is_set, 1e9, lambda: None))
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self.server.close()


class Place:
    """A learner's folder, a server of it, and other hosts."""

    def __init__(self, path: Path) -> None:
        self.path, self.address = path, f"ipc://{path}/s"
        self.publisher = ShmPublisher(path / "source")
        self.closing: list[Any] = []

    def serve(self, **options: Any) -> Serving:
        self.closing.append(Serving(self.path / "source", self.address, **options))
        serving: Serving = self.closing[-1]
        return serving

    def host(self, name: str = "host", **options: Any) -> Mirror:
        (self.path / name).mkdir(mode=0o700, exist_ok=True)
        self.closing.append(Mirror(self.path / name / "mirror", self.address, **options))
        self.closing[-1].start()
        mirror: Mirror = self.closing[-1]
        return mirror

    def publish(self, version: int, branch: int = 0, **options: Any) -> WeightsVersion:
        return self.publisher.publish(branch, version, model(version, **options).items())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for each in reversed(made.closing):
        each.close()


def holds(mirror: Mirror, id: WeightsVersion) -> bool:
    return until(lambda: ShmSubscriber(mirror.dir).latest() == id)


def received(mirror: Mirror) -> dict[str, torch.Tensor]:
    opened = ShmSubscriber(mirror.dir).open()
    got = {name: tensor.clone() for name, tensor in opened.tensors()}
    opened.close()
    return got


def same(mirror: Mirror, version: int, **options: Any) -> bool:
    got, sent = received(mirror), model(version, **options)
    return got.keys() == sent.keys() and all(torch.equal(got[name], sent[name]) for name in sent)


def test_many_hosts_whole_then_what_changed(place: Place) -> None:
    serving = place.serve()
    hosts = [place.host(f"host-{i}") for i in range(3)]
    first = place.publish(0)
    assert all(holds(host, first) for host in hosts)
    for version in (1, 2, 3):
        id = place.publish(version)
        assert all(holds(host, id) for host in hosts)
        assert all(same(host, version) for host in hosts)
    assert all((host.counts["full"], host.counts["delta"]) == (1, 3) for host in hosts)
    size = 2 * 300_000
    assert all(size < host.counts["received_bytes"] < 1.05 * size for host in hosts)
    late = place.host("late")
    assert holds(late, id)
    assert same(late, 3)
    assert serving.server.counts["refused"] == 0


def test_the_examples_of_the_tree() -> None:
    assert doctest.testmod(tree).failed == 0


def in_a_tree(place: Place, count: int) -> tuple[Serving, list[Mirror]]:
    """Hosts that came one after another, fanout 2."""
    serving = place.serve(fanout=2)
    hosts: list[Mirror] = []
    for i in range(count):
        hosts.append(place.host(f"host-{i}", relays=True, answer_s=0.3, join_s=0.2))
        assert until(lambda n=i + 1: serving.server.tree.hosts == n)  # type: ignore[misc]
    return serving, hosts


def test_hosts_fetch_from_each_other_and_nobody_sends_more_than_its_share(place: Place) -> None:
    serving, hosts = in_a_tree(place, 7)
    size, sent = 2 * 300_000, serving.server.counts
    id = place.publish(0)
    assert all(holds(host, id) for host in hosts)
    assert size < sent["sent_bytes"] < 2.2 * size
    before = sent["sent_bytes"]
    for version in (1, 2):
        id = place.publish(version)
        assert all(holds(host, id) and same(host, version) for host in hosts)
    assert sent["sent_bytes"] - before < 0.05 * size, "deltas"
    for host in hosts:
        relay = host._relay
        assert relay is not None
        assert relay.server.counts["sent_bytes"] < 2.2 * size
        assert (host.counts["full"], host.counts["delta"], host.counts["lost"]) == (1, 2, 0)


def test_when_a_host_dies_those_that_fetched_from_it_go_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    _, hosts = in_a_tree(place, 5)
    first = place.publish(0)
    assert all(holds(host, first) for host in hosts)
    hosts[0].close()
    id = place.publish(1)
    assert all(holds(host, id) and same(host, 1) for host in hosts[1:])
    assert until(lambda: sum(host.counts["lost"] for host in hosts[1:]) >= 1)

    monkeypatch.setattr(mirror_module, "MAX_BEHIND", 2)
    deaf = hosts[1]._relay
    assert deaf is not None
    monkeypatch.setattr(deaf.server, "_look", lambda: None)
    id = place.publish(2)
    assert all(holds(host, id) and same(host, 2) for host in hosts[1:]), "who answers but lags is left too"


def test_a_new_branch_replaces_a_higher_version(place: Place) -> None:
    place.serve()
    host = place.host()
    assert holds(host, place.publish(9))
    assert holds(host, place.publish(2, branch=1))


def test_every_so_many_versions_the_whole_file(place: Place) -> None:
    place.serve(full_every=3)
    host = place.host()
    for version in range(7):
        assert holds(host, place.publish(version))
    assert (host.counts["full"], host.counts["delta"]) == (3, 4)


def test_who_is_too_far_behind_or_holds_other_weights_gets_the_whole_file(place: Place) -> None:
    """The base is wrong: here because the host holds weights that the server never had."""
    (place.path / "host").mkdir(mode=0o700)
    ShmPublisher(place.path / "host" / "mirror").publish(0, 1, model(40).items())
    serving = place.serve()
    before = place.publish(1)
    assert until(lambda: serving.server.latest == before)
    id = place.publish(2)
    assert until(lambda: serving.server.delta_bytes > 0)
    (place.path / "host" / "mirror").chmod(0o700)
    host = place.host()
    assert holds(host, id)
    assert (host.counts["full"], host.counts["delta"]) == (1, 0)


def test_one_process_of_a_host_fetches_and_another_takes_over(place: Place) -> None:
    place.serve()
    one, other = place.host(), place.host()
    assert holds(one, place.publish(0))
    assert sorted(m.counts["full"] for m in (one, other)) == [0, 1]
    fetches, stands_by = (one, other) if one.counts["full"] else (other, one)
    fetches.close()
    assert holds(stands_by, place.publish(1))
    assert (stands_by.counts["full"], stands_by.counts["delta"]) == (0, 1), "from what was there"
    folder = stands_by.dir
    stands_by.close()
    assert not folder.exists(), "the last one cleans up"


def test_what_was_published_can_be_had_while_the_learner_is_down_and_the_server_may_die(place: Place) -> None:
    id = place.publish(5)
    serving = place.serve()
    host = place.host(answer_s=0.3)
    assert holds(host, id)
    serving.close()
    place.closing.remove(serving)
    place.serve()
    assert holds(place.host("late"), id)
    assert holds(host, place.publish(6))


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
    server = Server(place.path / "source", place.address, 0, clock=lambda: now[0])
    try:
        for turn in range(30):
            now[0] = turn * AGAIN_S / 3
            server.turn()
        assert len([r for r in caplog.records if "not handed on" in r.message]) == 1
        assert server.latest is None
        id = place.publish(1)

        def served() -> bool:
            now[0] += AGAIN_S
            server.turn()
            return server.latest == id

        assert until(served, 5)
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
    place.publish(0)
    raw: Link[zmq.Socket[bytes]] = Link(zmq.Context.instance(), zmq.DEALER, place.address)
    good = {"op": "latest", "n": 1, "held": [-1, -1, ""], "full": False, "wait_s": 0}
    bad: list[bytes] = [b"", b"\xff", pack({}), pack({"op": "chunk"}), pack({"op": 3, "n": 2**64 - 1})]
    bad += [pack(good | {"held": x}) for x in ([], [1, 2], [1, 2, 3], "x", None, [True, 0, ""])]
    bad += [pack(good | {"wait_s": x}) for x in (-1, "1", float("nan"), float("inf"), None)]
    bad += [pack(good | {"full": 1})]
    bad += [pack({"op": "join", "n": 1} | x) for x in ({}, {"relay": "", "lost": ""}, {"relay": "a", "lost": 1})]
    for frame in bad:
        raw.socket.send(frame)
        assert raw.socket.poll(2000)
        assert unpack(raw.socket.recv_multipart()[0])["code"] == "malformed"
    assert serving.server.counts["refused"] == len(bad)
    raw.socket.send(pack(good))
    assert raw.socket.poll(2000)
    offer = unpack(raw.socket.recv_multipart()[0])
    chunk = {"op": "chunk", "n": 3, "payload": offer["payload"], "offset": 0, "length": 10}
    for wrong in ({"offset": -1}, {"offset": offer["bytes"]}, {"length": 0}, {"length": 1 << 30}, {"offset": 0.5}):
        raw.socket.send(pack(chunk | wrong))
        assert raw.socket.poll(2000)
        assert unpack(raw.socket.recv_multipart()[0])["code"] == "malformed"
    raw.socket.send(pack(chunk | {"payload": "x"}))
    assert raw.socket.poll(2000)
    assert unpack(raw.socket.recv_multipart()[0])["code"] == "gone"
    raw.close()


def test_over_tcp_with_keys(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config.model_validate({"launch": {"host": "127.0.0.1"}}))
    serving = Serving(run.shm, run.address("weights"))
    subscriber = MirroredSubscriber(run.shm / "mirror", run.address("weights"))
    try:
        id = ShmPublisher(run.shm).publish(0, 0, model(0).items())
        assert until(lambda: subscriber.latest() == id)
    finally:
        subscriber.close()
        serving.close()
        run.remove_temporary()


def test_in_a_tree_over_tcp_with_keys(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config.model_validate({"launch": {"host": "127.0.0.1"}}))
    serving = Serving(run.shm, run.address("weights"), fanout=1)
    hosts = []
    try:
        for count, name in enumerate(("a", "b"), 1):
            (tmp_path / name).mkdir(mode=0o700)
            hosts.append(Mirror(tmp_path / name / "mirror", run.address("weights"), relays=True, join_s=0.2))
            hosts[-1].start()
            assert until(lambda n=count: serving.server.tree.hosts == n)  # type: ignore[misc]
        id = ShmPublisher(run.shm).publish(0, 0, model(0).items())
        assert all(holds(host, id) for host in hosts)
        assert serving.server.counts["full"] == 1
    finally:
        for host in hosts:
            host.close()
        assert not list(run.private.glob("weights-*")), "addresses are taken back"
        serving.close()
        run.remove_temporary()


def test_a_mirror_that_broke_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(mirror_module.Mirror, "_take", broken)
    place.serve()
    place.publish(0)
    (place.path / "host").mkdir(mode=0o700)
    subscriber = MirroredSubscriber(place.path / "host" / "mirror", place.address)
    place.closing.append(subscriber)
    with pytest.raises(RunError, match="no longer received"):
        assert not until(lambda: subscriber.latest() is not None, 10)


def test_a_mirror_that_cannot_begin_says_so(place: Place) -> None:
    """Another process of the host, the last one there, may remove the folder at this moment."""
    (place.path / "host" / "mirror" / ".lock").mkdir(parents=True)
    (place.path / "host").chmod(0o700)
    (place.path / "host" / "mirror").chmod(0o700)
    subscriber = MirroredSubscriber(place.path / "host" / "mirror", place.address)
    place.closing.append(subscriber)
    with pytest.raises(RunError, match="no longer received"):
        assert not until(lambda: subscriber.latest() is not None, 5)


def test_a_folder_of_somebody_else_is_not_used(place: Place) -> None:
    (place.path / "host").mkdir(mode=0o777)
    (place.path / "host").chmod(0o777)
    with pytest.raises(RunError, match="others than this user"):
        place.host()
    place.closing.pop()
