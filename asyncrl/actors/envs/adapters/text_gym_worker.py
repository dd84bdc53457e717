"""Runs text games under the Python that has them, without asyncrl: `python -P text_gym_worker.py CONFIG`.

takes: {"n", "call": "reset" | "step" | "close", "episode", "task" | "text"}, one JSON object per line
gives: {"n", "result"} or {"n", "error"}; a reset gives text or messages, a step {messages, reward, done}
ends:  with its stdin
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any


def turn(messages: list[Any], reward: float, done: bool) -> dict[str, Any]:
    shown = [{"role": "user", "content": seen} if isinstance(seen, str) else seen for seen in messages]
    return {"messages": [] if done else shown, "reward": float(reward), "done": bool(done)}


class Gymnasium:
    """`reset(seed=) -> observation, info`; `step(text) -> observation, reward, terminated, truncated, info`."""

    def __init__(self, game: Any) -> None:
        self._game = game

    def reset(self, task: dict[str, Any]) -> str:
        observation, _ = self._game.reset(seed=task.get("seed"))
        return str(observation)

    def step(self, text: str) -> dict[str, Any]:
        observation, reward, terminated, truncated, _ = self._game.step(text)
        return turn([str(observation)], reward, terminated or truncated)

    def close(self) -> None:
        close = getattr(self._game, "close", None)
        if close is not None:
            close()


class TextArena:
    """`get_observation() -> player, text`, `step(text) -> done, info`; `close() -> rewards by player, info`."""

    def __init__(self, game: Any, opponent: Callable[[str], str] | None) -> None:
        self._game, self._opponent = game, opponent
        self._seen = ""

    def reset(self, task: dict[str, Any]) -> str:
        # Some games use the process's generator; calls come one at a time, so no other call draws from it meanwhile.
        random.seed(task.get("seed"))
        self._game.reset(num_players=2 if self._opponent else 1, seed=task.get("seed"))
        first = self._turn(done=False)["messages"]
        if not first:
            raise RuntimeError("the game was over before the policy's first move")
        return str(first[0]["content"])

    def step(self, text: str) -> dict[str, Any]:
        return self._turn(done=self._game.step(text)[0])

    def _turn(self, *, done: bool) -> dict[str, Any]:
        """Let the opponent move until it is the turn of the policy, which is player 0, or the game ends."""
        while not done:
            player, seen = self._game.get_observation()
            if player == 0:
                return turn([self._new(seen)], 0.0, False)
            if self._opponent is None:
                raise RuntimeError("it is another player's turn: set env.options.opponent")
            done, _ = self._game.step(self._opponent(str(seen)))
        rewards, _ = self._game.close()
        return turn([], (rewards or {}).get(0, 0.0), True)

    def _new(self, seen: Any) -> str:
        """The new part of an observation: most games repeat everything so far each time."""
        before, self._seen = self._seen, str(seen)
        return self._seen.removeprefix(before).strip()

    def close(self) -> None:
        return None


class SkyRL:
    """`init(prompt) -> messages, info`; `step(text) -> {observations, reward, done, ...}`; the row is its `extras`."""

    def __init__(self, make: Callable[[dict[str, Any]], Any]) -> None:
        self._make = make
        self._game: Any = None

    def reset(self, task: dict[str, Any]) -> list[dict[str, str]]:
        self._game = self._make(task)
        prompt = task["prompt"]
        messages, _ = self._game.init([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        return list(messages)

    def step(self, text: str) -> dict[str, Any]:
        out = self._game.step(text)
        return turn(list(out["observations"]), out["reward"], out["done"])

    def close(self) -> None:
        self._game.close()


def gem(config: dict[str, Any]) -> Callable[[], Any]:
    import gem as package

    return lambda: Gymnasium(package.make(config["game"], **config["options"]))


def textarena(config: dict[str, Any]) -> Callable[[], Any]:
    import textarena as package

    opponent = named(config["opponent"]) if config["opponent"] else None
    return lambda: TextArena(package.make(env_id=config["game"], **config["options"]), opponent)


def skyrl_gym(config: dict[str, Any]) -> Callable[[], Any]:
    import skyrl_gym as package

    return lambda: SkyRL(lambda task: package.make(config["game"], env_config=config["options"], extras=task))


GYMS = {"gem": gem, "skyrl_gym": skyrl_gym, "textarena": textarena}


def named(path: str) -> Any:
    """The object that `module:name` or `path/to/file.py:name` names."""
    module, _, name = path.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("game", module)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module} cannot be loaded as Python")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def maker(config: dict[str, Any]) -> Callable[[], Any]:
    """A function that makes a game per episode."""
    if config["gym"] in GYMS:
        return GYMS[config["gym"]](config)
    make, game = named(config["gym"]), {"game": config["game"]} if config["game"] else {}
    return lambda: Gymnasium(make(**game, **config["options"]))


class Games:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._playing: dict[str, Any] = {}

    def call(self, request: dict[str, Any]) -> Any:
        episode = request["episode"]
        if request["call"] == "close":
            game = self._playing.pop(episode, None)
            return game.close() if game is not None else None
        if request["call"] == "reset":
            game = self._playing[episode] = self._make()
            return game.reset(request["task"])
        return self._playing[episode].step(request["text"])


def main() -> None:
    # Output of games must not mix with the lines of the protocol.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(**reply: Any) -> None:
        print(json.dumps(reply, default=float), file=out, flush=True)

    config = json.loads(sys.argv[1])
    try:
        games = Games(maker(config))
    except (ImportError, AttributeError, OSError) as error:
        send(error=f"{sys.executable} cannot play {config['gym']}: {type(error).__name__}: {error}")
        sys.exit(1)
    send(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            send(n=request["n"], result=games.call(request))
        except Exception as error:
            send(n=request["n"], error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
