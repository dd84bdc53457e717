"""Reads a trace file back, and checks what Perfetto requires of it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Read:
    slices: list[dict[str, Any]]
    """With `process` and `lane` by name, `begin` and `end` in seconds since the trace's beginning."""
    arrows: list[tuple[dict[str, Any], dict[str, Any]]]
    """The slices that each arrow connects."""
    instants: list[dict[str, Any]]

    def of(self, process: str, name: str) -> list[dict[str, Any]]:
        return [s for s in self.slices if s["process"] == process and s["name"] == name]


def read_trace(path: Path) -> Read:
    """Raises AssertionError for a file that is no valid trace: slices of a lane that overlap, arrows without ends."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    names = {
        (e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]
    }
    slices = [
        e | {
            "process": names["process_name", e["pid"], None], "lane": names["thread_name", e["pid"], e["tid"]],
            "begin": e["ts"] / 1e6, "end": (e["ts"] + e["dur"]) / 1e6,
        }
        for e in events if e["ph"] == "X"
    ]  # fmt: skip
    check_nesting(slices)
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    assert starts.keys() == ends.keys(), "an arrow has one end only"
    tracks: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for one in slices:
        tracks[one["pid"], one["tid"]].append(one)
    arrows = [(_slice_at(tracks, starts[n]), _slice_at(tracks, ends[n])) for n in starts]
    return Read(slices, arrows, [e for e in events if e["ph"] == "i"])


def check_nesting(slices: list[dict[str, Any]]) -> None:
    lanes: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in slices:
        assert one["dur"] >= 0, one
        lanes[one["process"], one["lane"]].append(one)
    for lane, inside in lanes.items():
        open_until: list[float] = []
        for one in sorted(inside, key=lambda s: (s["ts"], -s["dur"])):
            while open_until and open_until[-1] <= one["ts"] + 0.15:  # times are rounded to 0.1 us
                open_until.pop()
            assert not open_until or one["ts"] + one["dur"] <= open_until[-1] + 0.15, (lane, one)
            open_until.append(one["ts"] + one["dur"])


def _slice_at(tracks: dict[tuple[int, int], list[dict[str, Any]]], flow: dict[str, Any]) -> dict[str, Any]:
    """The outermost slice around an end of an arrow, as Perfetto binds it."""
    around = [s for s in tracks[flow["pid"], flow["tid"]] if s["ts"] <= flow["ts"] <= s["ts"] + s["dur"]]
    assert around, f"an arrow ends in no slice: {flow}"
    return max(around, key=lambda s: s["dur"])
