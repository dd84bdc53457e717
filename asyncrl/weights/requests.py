"""Checks what both servers of weights are asked: is there a newer version than the one I hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.weights.protocol import WeightsVersion
from asyncrl.wire import WireError

NO_VERSION = WeightsVersion(-1, -1, "")
"""What a host says that holds none."""
MAX_HELD = 4096
"""Requests, and readers, that a server remembers at once."""
MAX_WAIT_S = 60.0
_MAX_DIGEST = 128
_MOST = (2**31 - 1, 2**53)


@dataclass(frozen=True, slots=True)
class HeldLatest:
    """A request that waits for a newer version: what is kept of it. Its numbers are only compared."""

    n: int
    branch: int
    version: int
    digest: str
    full: bool
    until: float
    kept: WeightsVersion | None
    """The pinned version that the host holds; None: it has not said, and is told of none."""


def number(request: Mapping[str, Any]) -> int:
    """The number of a request, to which its answer is given; -1 for one that is none."""
    n = request.get("n")
    return n if type(n) is int and abs(n) < 2**63 else -1


def held_latest(request: Mapping[str, Any], now: float) -> HeldLatest:
    """Raises WireError."""
    wait_s, full = request.get("wait_s"), request.get("full", False)
    branch, version, digest = _version(request, "held")
    kept = WeightsVersion(*_version(request, "kept")) if "kept" in request else None
    if type(wait_s) not in (int, float) or not 0 <= float(wait_s or 0) <= MAX_WAIT_S or type(full) is not bool:
        raise WireError(f"wait_s is not a number of seconds from 0 to {MAX_WAIT_S:g}, or full is not true or false")
    return HeldLatest(number(request), branch, version, digest, full, now + float(wait_s or 0), kept)


def _version(request: Mapping[str, Any], field: str) -> tuple[int, int, str]:
    """Branch, version and digest; -1, -1 and none: no version. Raises WireError."""
    said = request.get(field)
    if not isinstance(said, list) or [type(x) for x in said] != [int, int, str]:
        raise WireError(f"{field} is not [branch, version, digest]")
    branch, version, digest = said
    if not -1 <= branch <= _MOST[0] or not -1 <= version <= _MOST[1] or len(digest) > _MAX_DIGEST:
        raise WireError(
            f"{field} is no version: expected at most {_MOST} and a digest of at most {_MAX_DIGEST} characters"
        )
    return branch, version, digest
