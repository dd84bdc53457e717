"""A fake of torch.cuda's streams that records on which of them NCCL is asked to send and what the host waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

DEFAULT = "default"


class FakeCuda:
    def __init__(self) -> None:
        self.current = DEFAULT
        self.made = 0
        self.sent_on: list[str] = []
        self.waited_for: list[str] = []

    def Stream(self, device: Any) -> str:
        self.made += 1
        return f"stream {self.made}"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self, device: Any) -> FakeStream:
        return FakeStream(self, self.current)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self._name = cuda, name

    def synchronize(self) -> None:
        self._cuda.waited_for.append(self._name)


class FakeNccl:
    """A group whose broadcasts are complete at once."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def broadcast(self, tensors: Any, options: Any) -> FakeNccl:
        self._cuda.sent_on.append(self._cuda.current)
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class FakeChunk:
    is_cuda, device = True, "cuda:0"
