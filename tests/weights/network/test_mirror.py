"""A version on its way to another host, over real sockets: whole, as a delta, in a tree, after silence."""

from __future__ import annotations

import doctest
import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.run_folder import RunFolder
from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber
from asyncrl.weights.network import fanout
from asyncrl.weights.network import mirror as mirror_module
from asyncrl.weights.network.mirror import Mirror
from asyncrl.weights.network.subscriber import MirroredSubscriber
from asyncrl.weights.requests import MAX_HELD
from tests.weights.network.mirror_stage import Place, Serving, holds, model, same, until


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
    assert doctest.testmod(fanout).failed == 0


def in_a_tree(place: Place, count: int) -> tuple[Serving, list[Mirror]]:
    """Hosts that came one after another, fanout 2."""
    serving = place.serve(fanout=2)
    hosts: list[Mirror] = []
    for i in range(count):
        hosts.append(place.host(f"host-{i}", relays=True, answer_s=0.3, join_s=0.2))
        assert until(lambda n=i + 1: serving.server.fanout.hosts == n)  # type: ignore[misc]
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


def test_a_relay_that_fails_is_counted_and_started_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, its host stayed in the tree for the rest of the run, and others were sent to a silent address."""
    serving, hosts = in_a_tree(place, 3)
    assert all(holds(host, place.publish(0)) for host in hosts)
    failed = hosts[0]._relay
    assert failed is not None

    def too_many_open_files() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(failed.server, "_look", too_many_open_files)
    assert until(lambda: hosts[0].counts["relays_ended"] == 1)
    assert until(lambda: hosts[0]._relay not in (None, failed))
    again = hosts[0]._relay
    assert again is not None
    serving.server.fanout._heard.clear()
    assert until(lambda: again.address in serving.server.fanout._heard), "it is a part of the tree again"
    newest = place.publish(1)
    assert all(holds(host, newest) and same(host, 1) for host in hosts)
    reader = ShmSubscriber(hosts[0].dir)
    late = Mirror(place.path / "late", again.address)
    (place.path / "late").mkdir(mode=0o700)
    place.closing.append(late)
    late.start()
    assert holds(late, newest), "and serves what it fetched"
    assert reader.latest() == newest
    assert not again.ended


def test_a_host_that_can_listen_no_longer_fetches_from_the_server(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hosts = in_a_tree(place, 3)
    assert all(holds(host, place.publish(0)) for host in hosts)
    failed = hosts[2]._relay
    assert failed is not None
    monkeypatch.setattr(mirror_module, "relay", lambda folder, source: None)
    monkeypatch.setattr(failed.server, "_look", lambda: 1 / 0)
    assert until(lambda: hosts[2].counts["relays_ended"] == 1)
    assert until(lambda: hosts[2]._relay is None and hosts[2]._parent is None)
    newest = place.publish(1)
    assert all(holds(host, newest) for host in hosts)
    assert hosts[2].counts["relays_ended"] == 1


def test_a_host_that_the_tree_refuses_fetches_from_the_server(place: Place) -> None:
    """Before, it asked again and again, and fetched nothing any more: a run under chaos stood still."""
    serving = place.serve(fanout=2)
    serving.server.fanout._heard = {f"host {i}": float("inf") for i in range(MAX_HELD)}
    host = place.host("host", relays=True, answer_s=0.3, join_s=0.02)
    for version in range(3):
        assert holds(host, place.publish(version))
    assert serving.server.counts["refused"] > 0


def test_a_host_that_is_ahead_of_the_one_it_fetches_from_does_not_go_back(place: Place) -> None:
    """It had another parent before, or fetched from the server for a while."""
    (place.path / "host").mkdir(mode=0o700)
    ShmPublisher(place.path / "host" / "mirror").publish(0, 1, model(1).items())
    (place.path / "host" / "mirror").chmod(0o700)
    relay = place.serve(relays=True)
    behind = place.publish(0)
    host = place.host()
    assert until(lambda: relay.server.latest == behind)
    assert not until(lambda: ShmSubscriber(host.dir).latest() == behind, 0.5)
    assert relay.server.counts["sent_bytes"] == 0
    assert holds(host, place.publish(2))


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
            assert until(lambda n=count: serving.server.fanout.hosts == n)  # type: ignore[misc]
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
        assert not until(lambda: subscriber.latest() is not None, 60)


def test_a_process_that_comes_while_the_last_one_leaves_makes_the_folder_anew(place: Place) -> None:
    place.serve()
    id = place.publish(0)
    folder = place.path / "host" / "mirror"
    folder.mkdir(parents=True)
    (place.path / "host").chmod(0o700)
    folder.chmod(0o700)
    leaving = os.open(folder / ".users", os.O_RDWR | os.O_CREAT)
    fcntl.flock(leaving, fcntl.LOCK_EX)
    mirror = Mirror(folder, place.address)
    comes = threading.Thread(target=mirror.start)
    comes.start()
    comes.join(0.2)
    assert comes.is_alive()
    shutil.rmtree(folder)
    os.close(leaving)
    comes.join(60)
    assert not comes.is_alive()
    place.closing.append(mirror)
    assert holds(mirror, id)


def test_a_mirror_that_cannot_begin_says_so(place: Place) -> None:
    (place.path / "host" / "mirror" / ".lock").mkdir(parents=True)
    (place.path / "host").chmod(0o700)
    (place.path / "host" / "mirror").chmod(0o700)
    subscriber = MirroredSubscriber(place.path / "host" / "mirror", place.address)
    place.closing.append(subscriber)
    with pytest.raises(RunError, match="no longer received"):
        assert not until(lambda: subscriber.latest() is not None, 60)


def test_a_folder_of_somebody_else_is_not_used(place: Place) -> None:
    (place.path / "host").mkdir(mode=0o777)
    (place.path / "host").chmod(0o777)
    with pytest.raises(RunError, match="others than this user"):
        place.host()
    place.closing.pop()
