"""Ranks that stay and play one function after another: what torch finds out once, how each operator is sharded say, is
found out once, which is half of the time that a short function takes.

For functions that leave nothing behind in their process; one that fails ends its ranks, and the next starts new ones.
Whoever kills ranks, or joins a group otherwise, takes ranks.py.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import tempfile
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
LOOK_S = 2.0
"""How often a rank that has nothing to do looks whether there still is somebody to play for."""
_kept: dict[int, _Kept] = {}


def on_kept_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments)`, all of it picklable, returns on each of `size` ranks that form one process group
    over loopback. Fails with a rank's traceback."""
    if size in _kept and not _kept[size].alive:  # another test ended them
        _kept.pop(size).end()
    if size not in _kept:
        _kept[size] = _Kept(size)
    try:
        return _kept[size].play(function, arguments)
    except BaseException:
        _kept.pop(size).end()
        raise


def end_all() -> None:
    while _kept:
        _kept.popitem()[1].end()


class _Kept:
    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (rank, size, Path(self._folder.name) / "rendezvous", there)
            self._processes.append(context.Process(target=_stay, args=arguments, daemon=True))
            self._processes[-1].start()
            there.close()
            self._pipes.append(here)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def play(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        task = pickle.dumps((function, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(answers) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
            assert ready, f"no answer within {DEADLINE_S:g} s"
            for rank, pipe in enumerate(self._pipes):
                if pipe in ready:
                    failed, answer = pickle.loads(pipe.recv_bytes())
                    assert not failed, answer
                    answers[rank] = torch.load(io.BytesIO(answer), weights_only=False)
        return [answers[rank] for rank in range(len(self._pipes))]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _stay(rank: int, size: int, rendezvous: Path, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    parent = os.getppid()
    store = dist.FileStore(str(rendezvous), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    while os.getppid() == parent:
        if not pipe.poll(LOOK_S):
            continue
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
            answer = io.BytesIO()
            torch.save(function(*arguments), answer)
            told = (False, answer.getvalue())
        except BaseException:
            told = (True, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(told))
