"""Every number of a request for a newer version has a bound, and is sent at it, below it and beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.weights import requests
from asyncrl.weights.local.shm import ShmPublisher
from asyncrl.weights.network.server import MAX_CHUNK_BYTES, WeightsServer
from asyncrl.weights.requests import held_latest
from asyncrl.wire import WireError, pack

GOOD: dict[str, Any] = {"op": "latest", "n": 1, "held": [-1, -1, ""], "full": False, "wait_s": 0.0}
HUGE = (2**63 - 1, 2**64 - 1, -(2**63))


@pytest.mark.parametrize(("place", "most"), [(0, 2**31 - 1), (1, 2**53)])
def test_the_version_held_is_taken_up_to_its_bound(place: int, most: int) -> None:
    def latest(value: int) -> dict[str, Any]:
        return GOOD | {"held": [value if at == place else old for at, old in enumerate(GOOD["held"])]}

    for good in (-1, 0, most):
        kept = held_latest(latest(good), 0.0)
        assert (kept.branch, kept.version)[place] == good
    for bad in (-2, most + 1, *HUGE):
        with pytest.raises(WireError, match="held is no version"):
            held_latest(latest(bad), 0.0)
    for bad in (-2, most + 1, *HUGE):
        with pytest.raises(WireError, match="kept is no version"):
            held_latest(GOOD | {"kept": latest(bad)["held"]}, 0.0)


def test_waits_and_digests_are_taken_up_to_their_bound_and_nothing_else_is_kept() -> None:
    assert held_latest(GOOD | {"wait_s": 60, "more": "x" * 60_000}, 1.0).until == 61.0
    for bad in (-1, 60.1, float("nan"), float("inf"), *HUGE, True, "1"):
        with pytest.raises(WireError, match="wait_s"):
            held_latest(GOOD | {"wait_s": bad}, 0.0)
    held_latest(GOOD | {"held": [0, 0, "d" * 128]}, 0.0)
    with pytest.raises(WireError, match="digest of at most 128"):
        held_latest(GOOD | {"held": [0, 0, "d" * 129]}, 0.0)


def test_a_chunk_is_given_within_the_file_and_the_number_of_requests_held_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = ShmPublisher(tmp_path / "w").publish(0, 0, [])
    server = WeightsServer(tmp_path / "w", f"ipc://{tmp_path}/s", 0)
    while server.latest is None:
        server.turn()
    size = len(server._current.data)  # type: ignore[union-attr]
    chunk = {"op": "chunk", "n": 1, "payload": f"0-0-{id.digest}", "offset": 0, "length": 1}
    good = [{}, {"offset": size - 1}, {"length": MAX_CHUNK_BYTES}]
    for change in good:
        server._handle([b"peer", pack(chunk | change)])
    assert (server.counts["chunks"], server.counts["refused"]) == (len(good), 0)
    bad = [{name: value} for name in ("offset", "length") for value in (-1, *HUGE, 0.5, True)]
    bad += [{"offset": size}, {"length": 0}, {"length": MAX_CHUNK_BYTES + 1}]
    for change in bad:
        server._handle([b"peer", pack(chunk | change)])
    assert (server.counts["chunks"], server.counts["refused"]) == (len(good), len(bad))
    monkeypatch.setattr("asyncrl.weights.network.server.MAX_HELD", 10)
    for peer in range(12):
        server._handle([str(peer).encode(), pack(GOOD)])
    assert (len(server._held), server.counts["refused"]) == (10, len(bad) + 2)
    server.close()
    assert requests.number({"n": 2**63}) == -1
