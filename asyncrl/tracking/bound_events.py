"""Changes of an automatic bound on staleness and of tuned slots, from a run's events.jsonl."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

SHOWN = 40
"""Changes that the report lists."""


CHANGED = {"bound": "the bound on staleness", "slots": "the number of slots of each actor"}
"""What changes, by the kind of the event."""
_TITLES = {
    "bound": "bound on staleness (buffer.max_staleness: auto)",
    "slots": "slots of each actor (launch.tuning: auto)",
}


def changes(events: Path, kind: str = "bound") -> list[str]:
    """A sentence for each change that the buffer reported, in order. Empty: it is fixed, or never changed."""
    found = []
    for line in events.read_text(errors="replace").splitlines() if events.is_file() else ():
        with suppress(ValueError, TypeError, KeyError):  # a killed launcher leaves part of a line
            event = json.loads(line)
            if event["kind"] == kind and event["role"] == "buffer":
                found.append(f"{event[kind]} from step {event['step']} on: {event['why']}")
    return found


def last_change(events: Path) -> list[str]:
    """The lines of `asyncrl why`; none without a change."""
    return [f"{what} is {said}" for kind, what in CHANGED.items() for said in changes(events, kind)[-1:]]


def note(events: Path) -> list[tuple[str, str]]:
    """Titles and sentences of the report."""
    found = []
    for kind, title in _TITLES.items():
        if said := changes(events, kind):
            left_out = f"{len(said) - SHOWN} earlier changes; " if len(said) > SHOWN else ""
            found.append((title, left_out + "; ".join(said[-SHOWN:])))
    return found
