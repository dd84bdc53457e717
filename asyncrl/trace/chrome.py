"""A timeline in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing read. Pure.

Source: "Trace Event Format", Google, sections on complete (X), flow (s, f), instant (i) and metadata (M) events.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from asyncrl.trace.timeline import Slice, Timeline

_FIRST = ("learner", "evaluation", "buffer", "weights", "launcher")
"""Processes that stand above the others, in this order."""


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of `traceEvents`, times in microseconds since the timeline's beginning."""
    start = min((s.begin for s in timeline.slices), default=0.0)
    processes = sorted({s.process for s in timeline.slices}, key=_natural)
    processes.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    pids = {name: number for number, name in enumerate(processes, 1)}
    lanes = sorted({(s.process, s.lane) for s in timeline.slices}, key=lambda key: (_natural(key[0]), _natural(key[1])))
    tids = {key: number for number, key in enumerate(lanes, 1)}

    def at(seconds: float) -> float:
        return round((seconds - start) * 1e6, 1)

    def track(one: Slice) -> dict[str, int]:
        return {"pid": pids[one.process], "tid": tids[one.process, one.lane]}

    for name, pid in pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for (process, lane), tid in tids.items():
        yield {"ph": "M", "name": "thread_name", "pid": pids[process], "tid": tid, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pids[process], "tid": tid, "args": {"sort_index": tid}}
    for one in timeline.slices:
        begin = at(one.begin)
        yield {
            "ph": "X", "name": one.name, "cat": one.lane.split()[0], "ts": begin, "dur": round(at(one.end) - begin, 1),
            **track(one), "args": dict(one.arguments),
        }  # fmt: skip
    for number, arrow in enumerate(timeline.arrows, 1):
        flow = {"name": "trained", "cat": "trained", "id": number}
        inside = max(at(arrow.source.begin), round(at(arrow.source.end) - 0.1, 1))  # an end belongs to no slice
        yield {"ph": "s", "ts": inside, **track(arrow.source), **flow}
        yield {"ph": "f", "bp": "e", "ts": at(arrow.target.begin), **track(arrow.target), **flow}
    for instant in timeline.instants:
        yield {"ph": "i", "s": "g", "name": instant.name, "ts": at(instant.at), "pid": pids.get("learner", 1), "tid": 0}


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts actor-10 behind actor-9.

    >>> sorted(["slot 10", "slot 9"], key=_natural)
    ['slot 9', 'slot 10']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
