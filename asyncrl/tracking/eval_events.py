"""Which results of evaluations were told: a learner that starts again tells the latest ones once more, since the one
before it may have died before its report was taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

KINDS = ("eval", "eval_failed")


class ToldResults:
    def __init__(self, events: Path) -> None:
        """`events`: the file to which earlier launches of the run have written theirs."""
        self._told: set[tuple[Any, ...]] = set()
        for line in events.read_text(errors="replace").splitlines() if events.exists() else ():
            if '"eval' in line:
                with suppress(ValueError, AttributeError):  # a killed launcher leaves part of a line
                    event = json.loads(line)
                    self.seen_before(event.get("kind"), event)

    def seen_before(self, kind: Any, fields: Mapping[str, Any]) -> bool:
        """Whether this result was told before, and remembers it; False for any other event."""
        if kind not in KINDS:
            return False
        result = tuple(str(fields.get(name)) for name in ("branch", "set", "step"))
        before = len(self._told)
        self._told.add((kind, *result))
        return len(self._told) == before
