"""Changes of an automatic bound on staleness, from a run's events.jsonl."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

SHOWN = 40
"""Changes that the report lists."""


def changes(events: Path) -> list[str]:
    """A sentence for each change that the buffer reported, in order. Empty: the bound is fixed, or never changed."""
    found = []
    for line in events.read_text(errors="replace").splitlines() if events.is_file() else ():
        with suppress(ValueError, TypeError, KeyError):  # a killed launcher leaves part of a line
            event = json.loads(line)
            if event["kind"] == "bound" and event["role"] == "buffer":
                found.append(f"{event['bound']} from step {event['step']} on: {event['why']}")
    return found


def last_change(events: Path) -> list[str]:
    """The line of `asyncrl why`; none without a change."""
    return [f"the bound on staleness is {said}" for said in changes(events)[-1:]]


def note(events: Path) -> list[tuple[str, str]]:
    """Title and sentence of the report."""
    said = changes(events)
    left_out = f"{len(said) - SHOWN} earlier changes; " if len(said) > SHOWN else ""
    return [("bound on staleness (buffer.max_staleness: auto)", left_out + "; ".join(said[-SHOWN:]))] if said else []
