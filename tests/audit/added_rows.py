"""What a run adds to its tasks, for the tests that kill its buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.data.base import GroupResult


def more(version: int, results: Sequence[GroupResult], tasks: Sequence[Any]) -> list[dict[str, Any]]:
    """Two variations of the first task that was complete."""
    return [{"prompt": f"again, after {version}: {tasks[0]['id']}"} for _ in range(2) if tasks]
