"""The interfaces of one kind of server: its HTTP requests, and the transfer of new weights to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.actors.engines.protocol import Sampling
from asyncrl.actors.engines.servers.http import Servers

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


@dataclass(slots=True)
class Output:
    """The output of a request so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    """Kept ids of each token, from a server that returns them."""
    spans: list[Mapping[str, Any]] = field(default_factory=list)
    """{version, start, end} over the ids, in order."""
    reason: str | None = None
    why: str = ""
    """The server's reason for an abort."""


class Dialect(Protocol):
    """The HTTP interface of one kind of server. Paths are relative to a server's URL; a body is JSON."""

    name: str
    health: str

    def generate(self, request: str, prompt: list[int], n: int, sampling: Sampling, salt: str) -> tuple[str, Any]:
        """(path, body) of a streamed request. `n`: most new tokens, within the room left. `salt` keeps cached prefixes
        of other weights apart."""
        ...

    def take(self, chunk: Any, output: Output) -> None:
        """Add one event of the stream."""
        ...

    def abort(self, request: str) -> tuple[str, Any]: ...
    def pause(self, recompute_kv: bool) -> tuple[str, Any]: ...
    def resume(self) -> tuple[str, Any]: ...
    def name_version(self, version: str) -> tuple[str, Any]: ...

    def refused(self, reply: Any) -> str:
        """Why a command that was answered did not succeed; empty if it did."""
        ...


class Carrier(Protocol):
    """Transfers new weights to the servers."""

    async def start(self, servers: Servers) -> None:
        """Called once, when all servers serve."""
        ...

    async def load(self, servers: Servers, folder: Path, tensors: Tensors, version: str, recompute_kv: bool) -> None:
        """Load `tensors` into all servers, while they are paused. `folder`: a folder that they can read, removed
        afterwards. Raises EngineDied."""
        ...

    def close(self) -> None: ...
