"""A text game with gymnasium's `reset` and `step`, in plain Python: the policy guesses a digit.

asyncrl launch --config configs/text-gym.yaml
"""

from __future__ import annotations

import random
from typing import Any


class Guess:
    """Tells whether the digit is higher or lower; reward 1 for finding it within `tries`."""

    def __init__(self, tries: int = 4) -> None:
        self._tries = tries
        self._secret = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._secret = random.Random(seed).randrange(10)
        return "Which digit?", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._tries -= 1
        guess = text.strip()
        if guess == str(self._secret):
            return "Yes.", 1.0, True, False, {}
        hint = ("higher" if int(guess) < self._secret else "lower") if guess.isdecimal() else "not a digit"
        return hint, 0.0, False, self._tries == 0, {}
