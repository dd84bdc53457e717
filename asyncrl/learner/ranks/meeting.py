"""Where the ranks find each other: a store of torch, which carries their addresses.

    one host         a file in a folder that only its owner can read
    several nodes    rank 0 listens on the address of its host, on a free port, and announces both in the run folder;
                     the others come there, and all prove that they have the run's key before they read anything else

torch's store itself has neither keys nor encryption: docs/how-to/security.md.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.config.rules.ranks import nodes_of_ranks
from asyncrl.learner.ranks.interface import bind_to
from asyncrl.learner.ranks.membership import Exchange, prove
from asyncrl.run_folder import replace
from asyncrl.sockets import own_host

CONNECT_S = 5.0
"""After this time without an answer, the announcement is read again: rank 0 may have been started elsewhere."""
LOOK_S = 0.1


def meet(config: Config, rank: int, rendezvous: Path, key: bytes) -> Any:
    """The store of these ranks, through which they have found each other. `rendezvous`: a file that is not there yet.
    `key`: of the run; not needed on one host. Raises RuntimeError when the others do not come within `launch.start_s`,
    or lack the key."""
    size, wait = config.learner.ranks, timedelta(seconds=config.launch.start_s)
    if nodes_of_ranks(config) == 1:
        store = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
        store.set_timeout(wait)
        return store
    if rank == 0:
        leader = own_host(config.launch.host)
        store = listen(leader, rendezvous, size, wait)
    else:
        store, leader = reach(rendezvous, size, wait)
    bind_to(leader)
    prove(through_store(store, rank, size), key, rank, size)
    return store


def listen(host: str, rendezvous: Path, size: int, wait: timedelta) -> Any:
    """Rank 0's store, on no other address than `host`, which it announces."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, size, is_master=True, timeout=wait, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    replace(rendezvous, f"{host} {port}", mode=0o600)
    return store


def reach(rendezvous: Path, size: int, wait: timedelta) -> tuple[Any, str]:
    """The store that rank 0 has announced, and rank 0's address."""
    until = time.monotonic() + wait.total_seconds()
    problem = "nothing is announced there"
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError):
            host, _, port = rendezvous.read_text().partition(" ")
            patience = min(CONNECT_S, max(LOOK_S, until - time.monotonic()))
            try:
                store = connect(host, int(port), size, patience)
                store.set_timeout(wait)
                return store, host
            except TimeoutError:
                problem = f"{host}:{port} does not answer"
            except dist.DistNetworkError as error:
                problem = f"{host}:{port} does not answer: {error}".partition("\n")[0]
        time.sleep(LOOK_S)
    raise RuntimeError(
        f"rank 0 of the learner was not reached through {rendezvous} within launch.start_s = "
        f"{wait.total_seconds():g} s ({problem}): its log says why; the nodes must reach each other's ports."
    )


def connect(host: str, port: int, size: int, patience: float) -> Any:
    """The store at this address. Raises TimeoutError after `patience` seconds, and DistNetworkError.

    torch waits without a deadline for the first word of what takes the connection, which may be another program that
    has the port now: a thread is left to it."""
    given: Future[Any] = Future()

    def construct() -> None:
        try:
            timeout = timedelta(seconds=patience)
            given.set_result(
                dist.TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
            )
        except Exception as error:  # raised by `result`
            given.set_exception(error)

    threading.Thread(target=construct, name="rendezvous", daemon=True).start()
    return given.result(patience)


def through_store(store: Any, rank: int, size: int) -> Exchange:
    """Carries the proof through the store."""
    turns = itertools.count()

    def exchange(messages: Sequence[bytes]) -> list[bytes]:
        turn, width = next(turns), len(messages[0])
        store.set(f"membership {turn} {rank}", b"".join(messages))
        sent = [store.get(f"membership {turn} {other}") for other in range(size)]
        return [bytes(each[rank * width : (rank + 1) * width]) for each in sent]

    return exchange


def through_group(group: dist.ProcessGroup | None) -> Exchange:
    """Carries the proof over a group's own connections, of which every pair of ranks has one; None: the default
    group."""

    def exchange(messages: Sequence[bytes]) -> list[bytes]:
        sent = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        width = len(messages[0])
        return [bytes(received[at : at + width].numpy()) for at in range(0, len(received), width)]

    return exchange
