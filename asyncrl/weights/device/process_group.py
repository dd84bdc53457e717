"""A process group of the learner (rank 0) and the processes of engines: NCCL between GPUs, gloo between CPUs.

Each engine has one with the learner alone, so that engines come and go; engines that ask for a version at the same time
have one together (transports.py). The members meet at a file that all of them see. Every wait has a deadline: past it
the group is closed, and another one is made when it is needed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.errors import RunError

_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class ProcessGroup:
    """Joins when constructed. Raises RunError if the others do not come within `wait_s`."""

    def __init__(self, kind: str, meet: Path, rank: int, size: int, wait_s: float) -> None:
        self._rank, self._wait_s = rank, wait_s
        self._stream: torch.cuda.Stream | None = None
        self._connected = self._stuck = False
        store = dist.FileStore(str(meet), size)  # type: ignore[attr-defined]
        wait = timedelta(seconds=wait_s)
        store.set_timeout(wait)
        try:
            self._group: Any = _nccl(store, rank, size, wait) if kind == "nccl" else _gloo(store, rank, size, wait)
            store.set(f"joined {rank}", "1")
            store.wait([f"joined {other}" for other in range(size)], wait)
        except RuntimeError as error:  # torch's DistStoreError is one
            raise RunError(
                f"no process group for weights: not all of {size} processes came to {meet} within {wait_s:g} s: {error}"
            ) from error

    def send(self, chunks: Iterable[Tensor]) -> None:
        """Sends complete chunks. On a GPU from a stream of its own: NCCL waits for the stream that it is called on, and
        the thread's default is the one on which training computes, so that each would wait for the other."""
        for chunk in chunks:
            self._connect(chunk.device)
            with torch.cuda.stream(self._own(chunk.device)) if chunk.is_cuda else contextlib.nullcontext():
                self._broadcast(chunk)

    def _own(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream

    def receive(self, sizes: Sequence[int], device: torch.device) -> Iterator[Tensor]:
        """Yields chunks, each in memory of its own: an engine may hold tensors until a layer is complete."""
        for size in sizes:
            self._connect(device)
            chunk = torch.empty(size, dtype=torch.uint8, device=device)
            self._broadcast(chunk)
            yield chunk

    def _connect(self, device: torch.device) -> None:
        """Broadcast a byte before the first chunk. NCCL connects the members in its first call, and returns from it
        only when all of them are there, whatever the deadline: the call is made in a thread that can be left behind."""
        if self._connected:
            return
        failed: list[Exception] = []

        def call() -> None:
            try:
                byte = torch.empty(1, dtype=torch.uint8, device=device)
                with torch.cuda.stream(self._own(device)) if byte.is_cuda else contextlib.nullcontext():
                    self._broadcast(byte)
            except Exception as error:  # raised below
                failed.append(error)

        thread = threading.Thread(target=call, name="weights' first byte", daemon=True)
        thread.start()
        thread.join(self._wait_s + 1.0)
        self._stuck = thread.is_alive()
        if self._stuck:
            raise RunError(f"the processes of a group for weights did not connect within {self._wait_s + 1.0:g} s")
        if failed:
            raise failed[0]
        self._connected = True

    def _broadcast(self, data: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        deadline = time.monotonic() + self._wait_s
        try:
            work = self._group.broadcast([data], options)
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RunError(
                        f"a chunk of weights did not arrive within {self._wait_s:g} s: the other end is lost"
                    )
                time.sleep(0.0002)
            work.wait()
        except RuntimeError as error:
            raise RunError(f"weights did not arrive: {error}") from error
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()

    def close(self) -> None:
        """The others notice when they use it, over gloo at once."""
        if self._stuck or self._group is None:
            return  # a call that does not return has it, or it is closed
        group, self._group = self._group, None
        with contextlib.suppress(RuntimeError):  # running operations have failed already
            group.abort()


def _gloo(store: Any, rank: int, size: int, wait: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, wait)


def _nccl(store: Any, rank: int, size: int, wait: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = wait
    before = os.environ.get(_WATCHDOG)
    # Torch's watchdog ends the process of a group that hangs: the death of one engine would end the learner.
    os.environ[_WATCHDOG] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[_WATCHDOG]
        else:
            os.environ[_WATCHDOG] = before
