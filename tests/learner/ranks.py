"""A function in several processes that form one process group over loopback."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 90.0


def on_ranks(
    size: int,
    folder: Path,
    function: Callable[..., Any],
    *arguments: Any,
    joined: bool = True,
    deadline_s: float = DEADLINE_S,
) -> list[Any]:
    """What `function(*arguments)` returns on each rank; None of one that is killed. Fails with a rank's traceback.

    Not `joined`: it is called as `function(rank, rendezvous, *arguments)` and joins the others itself."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    pipes, ends, processes = [], [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        target = (rank, size, folder / "rendezvous", there, function, arguments, joined, deadline_s)
        processes.append(context.Process(target=_rank, args=target))
        pipes.append(here)
        ends.append(there)
    for process in processes:
        process.start()
    for there in ends:  # so that a rank that is killed ends its pipe
        there.close()
    answers: dict[Connection, Any] = {}
    deadline = time.monotonic() + deadline_s
    try:
        while len(answers) < size:
            ready = wait([p for p in pipes if p not in answers], timeout=max(deadline - time.monotonic(), 0))
            assert ready, f"no answer within {deadline_s:g} s"
            for pipe in ready:
                try:
                    failed, answer = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[pipe] = None  # type: ignore[index]
                    continue
                assert not failed, answer
                answers[pipe] = torch.load(io.BytesIO(answer), weights_only=False)  # type: ignore[index]
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    return [answers[pipe] for pipe in pipes]


def _rank(
    rank: int,
    size: int,
    rendezvous: Path,
    told: Connection,
    function: Any,
    arguments: Any,
    joined: bool,
    deadline_s: float,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    try:
        if joined:
            store = dist.FileStore(str(rendezvous), size)
            wait = timedelta(seconds=deadline_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
        else:
            arguments = (rank, rendezvous, *arguments)
        answer = io.BytesIO()  # tensors sent as they are would be files that end with this process
        torch.save(function(*arguments), answer)
        told.send((False, answer.getvalue()))
    except BaseException:
        told.send((True, traceback.format_exc()))
