"""What a policy version is to those who send and receive one; `local/shm.py` is the channel for one host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncrl.errors import RunError

if TYPE_CHECKING:
    import torch


class WeightsCorrupt(RunError):
    """A published version is missing, cut short or altered: it must not be loaded."""


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """Name of one set of weights."""

    branch: int
    version: int
    digest: str
    """32 hex digits over names, dtypes, shapes and bytes. Equal digests: equal weights, whatever the version."""

    @property
    def order(self) -> tuple[int, int]:
        """Greater is newer: a version of a later branch replaces a higher one of an earlier branch."""
        return (self.branch, self.version)


class Weights(Protocol):
    """One complete, verified policy version."""

    id: WeightsVersion

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor). Tied weights appear once. Views, to be read only, and only until `close`."""
        ...

    def close(self) -> None: ...


class Publisher(Protocol):
    def publish(self, branch: int, version: int, named: Iterable[tuple[str, torch.Tensor]]) -> WeightsVersion:
        """Make a version available to every subscriber, completely or not at all. `named` is consumed as a stream."""
        ...

    def latest(self) -> WeightsVersion | None:
        """What subscribers see now; it survives the publisher's process."""
        ...


class Subscriber(Protocol):
    def latest(self) -> WeightsVersion | None:
        """The newest version published, or None. Cheap: meant to be asked often."""
        ...

    def open(self, verify: bool = True) -> Weights:
        """The newest version. Raises WeightsCorrupt when it is not what its digest says."""
        ...

    def close(self) -> None: ...
