"""A server of OpenEnv (pip install openenv-core): the policy guesses a digit.

    .venv-gyms/bin/python examples/openenv_guess.py 8000

`configs/openenv.yaml` has each actor start one.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    digit: str


class Hint(Observation):
    text: str


class Digit(Environment[Guess, Hint, State]):
    """Tells whether the digit is higher or lower; reward 1 for finding it within four tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret, self._state = 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self._secret, self._state = random.Random(seed).randrange(10), State(episode_id=episode_id)
        return Hint(text="Which digit?")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        self._state.step_count += 1
        if action.digit == str(self._secret):
            return Hint(text="Yes.", reward=1.0, done=True)
        wrong = (
            "not a digit" if not action.digit.isdecimal() else "higher" if int(action.digit) < self._secret else "lower"
        )
        return Hint(text=wrong, reward=0.0, done=self._state.step_count == 4)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    # One environment per session; OpenEnv's default is one session at a time.
    app = create_fastapi_app(Digit, Guess, Hint, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
