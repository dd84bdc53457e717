"""The interfaces for sending and receiving policy versions; `local/shm.py` is the channel for one host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncrl.errors import RunError

if TYPE_CHECKING:
    import torch


class WeightsCorrupt(RunError):
    """A published version is missing, truncated or altered, and must not be loaded."""


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """Name of one set of weights."""

    branch: int
    version: int
    digest: str
    """32 hex digits over names, dtypes, shapes and bytes. Equal digests mean equal weights, whatever the version."""

    @property
    def order(self) -> tuple[int, int]:
        """Greater is newer: a version of a later branch replaces a higher one of an earlier branch."""
        return (self.branch, self.version)


class Weights(Protocol):
    """One complete, verified policy version."""

    id: WeightsVersion

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, tensor); tied weights once. The views may only be read, and only until `close`."""
        ...

    def close(self) -> None: ...


class Publisher(Protocol):
    def publish(self, branch: int, version: int, named: Iterable[tuple[str, torch.Tensor]]) -> WeightsVersion:
        """Make a version available to every subscriber, completely or not at all. `named` is consumed as a stream."""
        ...

    def latest(self) -> WeightsVersion | None:
        """The version that subscribers see now; it survives the publisher's process."""
        ...

    def pin(self, version: tuple[int, int]) -> bool:
        """Keep (branch, version), the latest or the one pinned before, until `unpin`, whatever is published meanwhile.
        False: it is gone."""
        ...

    def unpin(self) -> None:
        """Keep none but the latest."""
        ...


class Subscriber(Protocol):
    def latest(self) -> WeightsVersion | None:
        """The newest published version, or None. Cheap, since it is called often."""
        ...

    def pinned(self) -> WeightsVersion | None:
        """The version that the publisher has pinned, or None. Cheap as well."""
        ...

    def open(self, verify: bool = True, version: tuple[int, int] | None = None) -> Weights:
        """The newest version, or `version` if it is the newest or pinned. Raises WeightsCorrupt if it is not there or
        does not match its digest."""
        ...

    def close(self) -> None: ...
