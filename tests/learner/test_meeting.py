"""Ranks on several nodes find each other over tcp, on one address, and nothing passes without the run's key."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.keys import Keys
from asyncrl.learner.ranks import DistributedRanks, Order, meeting
from asyncrl.learner.ranks import interface as interfaces
from asyncrl.learner.ranks.interface import GLOO, NCCL, bind_to, holding
from asyncrl.learner.ranks.meeting import listen, reach, through_group
from asyncrl.learner.ranks.membership import NotOfThisRunError, prove
from asyncrl.run_folder import RunFolder, replace
from tests.learner.ranks import on_ranks
from tests.learner.tiny import tiny_config
from tests.waiting import until

KEY = b"k" * 32
WAIT = timedelta(seconds=60)


def two_nodes(**launch: Any) -> Config:
    values = tiny_config(ranks_per_node=1, backend="fsdp2", ranks=2).model_dump()
    return Config.model_validate(values | {"launch": {**values["launch"], **launch}})


def listening() -> set[str]:
    return {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def ordered(rank: int, rendezvous: Path, keys: tuple[bytes, bytes]) -> str:
    """What two ranks tell each other when they have met, each with its own key; or why they do not."""
    os.environ.pop(GLOO)
    try:
        ranks = DistributedRanks(two_nodes(start_s=20.0, host="127.0.0.2"), rank, rendezvous, keys[rank])
    except RuntimeError as error:
        rendezvous.with_name(f"refused-{rank}").touch()
        assert until(rendezvous.with_name(f"refused-{1 - rank}").exists), "rank 0's store would end with it"
        return str(error)
    assert os.environ[GLOO] in ("lo", "lo0")
    if rank == 0:
        assert "0.0.0.0" not in listening()
        ranks.order(Order("load", "a checkpoint"))
        return "met"
    return ranks.next().path


def test_ranks_meet_at_the_address_that_rank_0_announces(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, ordered, (KEY, KEY), joined=False) == ["met", "a checkpoint"]
    announced = tmp_path / "rendezvous"
    assert announced.read_text().startswith("127.0.0.2 ")
    assert announced.stat().st_mode & 0o077 == 0


def test_a_forged_rank_is_refused_and_so_is_what_it_takes_for_rank_0(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, ordered, (KEY, b"another"), joined=False)
    assert "the process that came as rank 1" in found[0]
    assert "the process that came as rank 0" in found[1]


def in_a_place(rank: int, keys: tuple[bytes, bytes]) -> str:
    """Two members of a group whose connections are there already."""
    try:
        prove(through_group(None), keys[rank], rank, 2)
    except NotOfThisRunError as error:
        return str(error)
    return "admitted"


def group_of_two(rank: int, rendezvous: Path, keys: tuple[bytes, bytes]) -> str:
    store = dist.FileStore(str(rendezvous), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=WAIT)
    return in_a_place(rank, keys)


def test_the_connections_themselves_are_proved(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path / "a", group_of_two, (KEY, KEY), joined=False) == ["admitted"] * 2
    refused = on_ranks(2, tmp_path / "b", group_of_two, (KEY, b"another"), joined=False)
    assert all("does not have this run's key" in said for said in refused)


def test_rank_0_listens_on_the_address_of_its_host_alone(tmp_path: Path) -> None:
    before = listening()
    store = listen("127.0.0.5", tmp_path / "announced", 2, WAIT)
    assert listening() - before == {"127.0.0.5"}
    found, leader = reach(tmp_path / "announced", 2, WAIT)
    found.set("a", "b")
    assert (store.get("a"), leader) == (b"b", "127.0.0.5")


def test_a_rank_finds_rank_0_where_it_was_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The announcement that it read first is of a process that is gone."""
    monkeypatch.setattr(meeting, "CONNECT_S", 0.2)
    announced = tmp_path / "announced"
    replace(announced, "127.0.0.1 1")  # nothing listens there
    failed = threading.Event()

    class Store(dist.TCPStore):
        def __init__(self, *given: Any, **named: Any) -> None:
            try:
                super().__init__(*given, **named)
            except dist.DistNetworkError:
                failed.set()
                raise

    monkeypatch.setattr(dist, "TCPStore", Store)
    found: list[Any] = []
    searching = threading.Thread(target=lambda: found.append(reach(announced, 2, WAIT)), daemon=True)
    searching.start()
    assert failed.wait(60.0)
    store = listen("127.0.0.1", announced, 2, WAIT)
    searching.join(60.0)
    assert found[0][1] == "127.0.0.1"
    del store


@pytest.fixture
def silent() -> Iterator[int]:
    """A port whose connections are taken, and which says nothing: another program has it now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]
    assert until(lambda: all(thread.name != "rendezvous" for thread in threading.enumerate())), "nobody answers them"


def begun(target: Callable[[], Any]) -> Future[Any]:
    """What a thread of its own gives, which holds up neither the test nor the end of Python."""
    given: Future[Any] = Future()

    def call() -> None:
        try:
            given.set_result(target())
        except RuntimeError as error:
            given.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return given


def test_a_port_that_takes_connections_and_says_nothing_is_named_in_time(tmp_path: Path, silent: int) -> None:
    announced = tmp_path / "announced"
    replace(announced, f"127.0.0.1 {silent}")
    with pytest.raises(RuntimeError, match=rf"\(127\.0\.0\.1:{silent} does not answer\)"):
        begun(lambda: reach(announced, 2, timedelta(seconds=1.0))).result(60.0)


def test_a_rank_whose_announcement_is_of_a_silent_port_reads_it_again(
    tmp_path: Path, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "CONNECT_S", 0.2)
    announced, tried = tmp_path / "announced", threading.Event()
    replace(announced, f"127.0.0.1 {silent}")

    class Store(dist.TCPStore):
        def __init__(self, *given: Any, **named: Any) -> None:
            tried.set()
            super().__init__(*given, **named)

    monkeypatch.setattr(dist, "TCPStore", Store)
    searching = begun(lambda: reach(announced, 2, WAIT))
    assert tried.wait(60.0)
    store = listen("127.0.0.1", announced, 2, WAIT)
    found, _ = searching.result(60.0)
    found.set("a", "b")
    assert store.get("a") == b"b"


def test_a_rank_0_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"rank 0 of the learner was not reached .*launch\.start_s = 0\.1 s \(nothing"
    ):
        reach(tmp_path / "announced", 2, timedelta(seconds=0.1))


def test_the_interface_is_the_one_with_the_address() -> None:
    found = {
        "lo": [("127.0.0.1", "255.0.0.0"), ("::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")],
        "eth0": [("02:42:ac:11:00:02", "ff:ff:ff:ff:ff:ff"), ("10.1.0.7", "255.255.0.0")],
        "ib0": [("10.1.2.7", "255.255.255.0"), ("fe80::1%ib0", "ffff:ffff:ffff:ffff::")],
    }
    told = {a: holding(a, found) for a in ("10.1.0.7", "10.1.2.7", "127.0.0.9", "fe80::1", "192.168.0.1")}
    assert told == {"10.1.0.7": "eth0", "10.1.2.7": "ib0", "127.0.0.9": "lo", "fe80::1": "ib0", "192.168.0.1": ""}


def test_what_the_node_s_environment_names_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "eth7")
    monkeypatch.delenv(NCCL, raising=False)
    bind_to("127.0.0.1")
    assert os.environ[GLOO] == "eth7"
    assert os.environ[NCCL] in ("=lo", "=lo0")
    monkeypatch.setattr(interfaces.psutil, "net_if_addrs", dict)
    bind_to("127.0.0.1")
    monkeypatch.delenv(NCCL)
    with pytest.raises(RunError, match=r"no network interface .* 127\.0\.0\.1, by which it reaches rank 0"):
        bind_to("127.0.0.1")


def test_the_key_is_of_the_launch_and_only_where_hosts_are_several(tmp_path: Path) -> None:
    here = RunFolder.create(tmp_path / "here", tiny_config())
    assert here.key("learner ranks") == b""
    there = RunFolder.create(tmp_path / "there", two_nodes())
    key = there.key("learner ranks")
    assert len(key) == 32
    assert key == there.key("learner ranks") != there.key("another purpose")
    assert Keys.load(there.private / "keys").server_secret not in key
    there.open()
    assert there.key("learner ranks") != key
    for run in (here, there):
        run.remove_temporary()
