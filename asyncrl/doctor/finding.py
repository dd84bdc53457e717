"""What a look at one thing found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["ok", "note", "fix"]
    """`note`: works, with a limit. `fix`: a run fails, or cannot start."""
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<5} {self.what:<11} {self.text}"
