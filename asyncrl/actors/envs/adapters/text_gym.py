"""Text games: gem, textarena, skyrl-gym, or any module with their `reset` and `step`.

They run in a separate process, `text_gym_worker.py`, under any Python that has the package: one per actor and
configuration, shared by its episodes.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.actors.envs.adapters.foreign_process import ForeignProcess, shared
from asyncrl.actors.envs.adapters.text_gym_worker import GYMS
from asyncrl.actors.envs.protocol import Environment, Message, Task, Turn, state_key
from asyncrl.actors.envs.tool_env import cut
from asyncrl.data.sources.seeds import opening

WORKER = str(Path(__file__).with_name("text_gym_worker.py"))
_numbers = itertools.count()


class TextGymEnv(Environment):
    """A game of gem, textarena or skyrl-gym (pip install gem-llm, textarena or skyrl-gym, in any Python)."""

    def __init__(  # noqa: PLR0913 - the options of a configuration
        self,
        gym: str,
        game: str = "",
        *,
        options: dict[str, Any] | None = None,
        opponent: str = "",
        python: str = "",
        workers: int = 1,
        replayable: bool = False,
        answer_s: float = 20.0,
        max_chars: int = 4000,
    ) -> None:
        """
        Args:
            gym: `gem`, `textarena`, `skyrl_gym`, or `module:Name` or `path/to/file.py:Name` of a callable that makes a
                game with gymnasium's `reset(seed=)` and `step(text)`, imported by the Python that plays.
            game: its id in the gym, e.g. `game:GuessTheNumber-v0-easy`.
            options: keyword arguments for making the game.
            opponent: for games of two players, a function from observation to move, named as in `gym`. The policy is
                player 0.
            python: the interpreter that has the package; empty: that of asyncrl.
            workers: processes that share the actor's episodes; each runs one step at a time.
            replayable: the game depends on its seed and the moves alone, so that an interrupted episode can play its
                moves again (`buffer.turns`).
            answer_s: a longer call ends its process, and the episodes in it fail with `env_error`. Keep it below
                `env.call_s`.
            max_chars: a longer observation is cut, with a note.
        """
        n = next(_numbers)
        self._episode = str(n)
        config = {"gym": gym, "game": game, "options": options or {}, "opponent": opponent, "worker": n % workers}
        self._command = [python or sys.executable, "-P", WORKER, json.dumps(config, sort_keys=True)]
        self._answer_s, self._max_chars = answer_s, max_chars
        self.replayable = replayable
        self._worker: ForeignProcess | None = None

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Raises ValueError for an unknown gym, a missing Python, or too few workers."""
        gym, python = str(options.get("gym")), options.get("python", "")
        if gym not in GYMS and ":" not in gym:
            raise ValueError(f"env.options.gym is {gym!r}; expected one of {', '.join(GYMS)} or module:function")
        if gym in GYMS and not options.get("game"):
            raise ValueError(f"env.options.game is not set; name a game of {gym} by its id")
        if options.get("opponent", "") and gym != "textarena":
            raise ValueError(f"env.options.opponent is for games of textarena, and env.options.gym is {gym!r}")
        if gym in GYMS and _lacks(python or sys.executable, gym):
            raise ValueError(
                f"env.options.python is {python!r} and {python or sys.executable} has no package {gym}: pip install "
                f"{gym.replace('_', '-').replace('gem', 'gem-llm')} there, or name a Python that has it"
            )
        if options.get("workers", 1) < 1:
            raise ValueError(f"env.options.workers is {options['workers']}; expected at least 1")

    async def reset(self, task: Task) -> list[Message]:
        """Raises RuntimeError with an error of the game, ConnectionError when its process ends or is stuck."""
        self._worker = shared("text_gym", self._command, answer_s=self._answer_s)
        seen = await self._worker.ask(call="reset", episode=self._episode, task=dict(task))
        self.reset_state = state_key(seen) if isinstance(seen, str) else None
        return opening(task, cut(seen, self._max_chars)) if isinstance(seen, str) else list(seen)

    async def step(self, message: Message) -> Turn:
        assert self._worker is not None, "reset comes first"
        reply = await self._worker.ask(call="step", episode=self._episode, text=message.get("content") or "")
        messages = [{**seen, "content": cut(seen["content"], self._max_chars)} for seen in reply["messages"]]
        # Of the whole text, as verl-agent compares observations.
        state = None if reply["done"] else state_key(*(seen["content"] for seen in reply["messages"]))
        return Turn(messages=messages, reward=reply["reward"], done=reply["done"], state=state)

    async def close(self) -> None:
        if self._worker is not None and self._worker.usable:
            await self._worker.ask(call="close", episode=self._episode)


def _lacks(python: str, package: str) -> bool:
    """Whether `python` lacks `package`, without importing it, which takes seconds. Raises ValueError for a Python that
    does not start."""
    find = "import sys, importlib.util as util; sys.exit(util.find_spec(sys.argv[1]) is None)"
    try:
        done = subprocess.run([python, "-P", "-c", find, package], timeout=60, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"env.options.python is {python!r}, which does not start: {error}") from error
    return done.returncode != 0
