"""Games of text in a process of their own: one's own anywhere, gem's, textarena's and skyrl-gym's where they are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from asyncrl.actors.envs.adapters.text_gym import WORKER, TextGymEnv
from asyncrl.actors.envs.hosting.pool import EnvWorkers
from asyncrl.actors.envs.protocol import Message, Turn, state_key
from asyncrl.data.sources.seeds import SeedSource
from tests.children import children

GUESS = f"{Path(__file__).parents[4]}/examples/text_game.py:Guess"
GYMS = os.environ.get("ASYNCRL_GYMS_PYTHON", "")
with_gyms = pytest.mark.skipif(not GYMS, reason="ASYNCRL_GYMS_PYTHON names no Python with the gyms: make test-gyms")
SEED = {"id": "t", "prompt": "", "seed": 3}
BROKEN = """
import os, time

class Game:
    def reset(self, seed=None):
        return "?", {}
    def step(self, text):
        if text == "die":
            os._exit(3)
        if text == "hang":
            time.sleep(60)
        raise ValueError(text)
"""


def env(gym: str, game: str = "", **options: Any) -> TextGymEnv:
    given = {"gym": gym, "game": game, **options}
    TextGymEnv.check(given)
    return TextGymEnv(**given)


async def say(env: TextGymEnv, text: str) -> Turn:
    return await env.step({"role": "assistant", "content": text})


def run(episode: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(episode, 60))


@pytest.mark.timeout(60)
def test_episodes_are_played_beside_each_other_in_one_process() -> None:
    async def episodes() -> None:
        first, second = env(GUESS, options={"tries": 2}), env(GUESS)
        opened = await first.reset(SEED | {"prompt": "Find it."})
        assert opened == [{"role": "user", "content": "Find it.\n\nWhich digit?"}]
        await second.reset(SEED)
        wrong = await say(first, "none")
        assert wrong == Turn(messages=[{"role": "user", "content": "not a digit"}], state=state_key("not a digit"))
        assert first.reset_state == second.reset_state == state_key("Which digit?")
        assert (await say(first, "x")) == Turn(done=True), "out of tries"
        assert await say(second, "3") == Turn(reward=1.0, done=True), "the digit of seed 3"
        await first.close()
        await second.close()
        with pytest.raises(RuntimeError, match="KeyError"):
            await say(first, "1")

    run(episodes())


@pytest.mark.timeout(60)
def test_a_game_that_fails_costs_its_episode_and_one_that_dies_or_hangs_those_of_its_process(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)

    async def episodes() -> None:
        def broken() -> TextGymEnv:
            return env(f"{file}:Game", answer_s=1.0)

        for word, error, why in (
            ("oops", RuntimeError, "ValueError: oops"),
            ("die", ConnectionError, "ended with 3"),
            ("hang", ConnectionError, "did not answer within 1.0 s"),
        ):
            played, beside = broken(), broken()
            await asyncio.gather(played.reset(SEED), beside.reset(SEED))
            with pytest.raises(error, match=why):
                await say(played, word)
            if error is ConnectionError:
                with pytest.raises(ConnectionError):
                    await say(beside, "oops")
            await played.close()
            await beside.close()
        abandoned = broken()
        await abandoned.reset(SEED)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(say(abandoned, "hang"), 0.1)
        while True:  # what hung is killed although nobody waits for it any more
            with contextlib.suppress(ConnectionError):
                await broken().reset(SEED)
                break

    run(episodes())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_in_a_worker_its_process_is_the_workers_and_ends_with_it(kind: Literal["threads", "processes"]) -> None:
    async def episode() -> None:
        async with EnvWorkers(kind, 1, "text_gym", {"gym": GUESS}, 30.0) as workers:
            played = workers.env()
            await played.reset(SEED)
            assert children(WORKER), "runs now"
            assert await played.step({"role": "assistant", "content": "3"}) == Turn(reward=1.0, done=True)
            await played.close()
        deadline = asyncio.get_running_loop().time() + 20
        while children(WORKER):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.1)

    run(episode())


KILLED = f"""
import asyncio, os, signal
from asyncrl.actors.envs.adapters.text_gym import TextGymEnv

async def play():
    await TextGymEnv({GUESS!r}).reset({SEED!r})
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(play())
"""


@pytest.mark.timeout(60)
def test_it_ends_with_an_actor_that_is_killed() -> None:
    name, value = "ASYNCRL_TEST_MARK", str(os.getpid())
    done = subprocess.run([sys.executable, "-c", KILLED], env=os.environ | {name: value}, timeout=50, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while [p for p in psutil.process_iter(["cmdline", "environ"])
           if WORKER in (p.info["cmdline"] or ()) and (p.info["environ"] or {}).get(name) == value]:  # fmt: skip
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.timeout(60)
def test_what_cannot_be_played_is_said() -> None:
    for options, message in (
        ({"gym": "gum"}, "expected one of gem, skyrl_gym, textarena"),
        ({"gym": "gem"}, "env.options.game is not set"),
        ({"gym": GUESS, "opponent": "a:b"}, "games of textarena"),
        ({"gym": "gem", "game": "g", "python": "/no/python"}, "does not start"),
        ({"gym": "gem", "game": "g", "python": sys.executable}, "has no package gem: pip install gem-llm there"),
        ({"gym": GUESS, "workers": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            TextGymEnv.check(options)

    async def absent() -> None:
        with pytest.raises(ConnectionError, match=r"cannot play .*no_such_game"):
            await env("no_such_game:Game", python=sys.executable).reset(SEED)

    run(absent())


def test_no_held_out_seed_is_trained_on() -> None:
    source = SeedSource("Play.", held_out_size=50, seed=1)
    held_out = {source.held_out(index)["seed"] for index in range(50)}
    trained = [source.task(index) for index in range(200)]
    assert not held_out & {task["seed"] for task in trained}
    assert trained == [SeedSource("Play.", seed=1).task(index) for index in range(200)]
    assert all(0 <= task["seed"] < 2**31 and task["prompt"] == "Play." for task in trained)
    assert trained != [SeedSource("Play.", seed=2).task(index) for index in range(200)]


@with_gyms
@pytest.mark.timeout(60)
def test_gem() -> None:
    async def episode() -> None:
        def gem() -> TextGymEnv:
            return env("gem", "game:GuessTheNumber-v0-easy", python=GYMS, answer_s=60.0)

        played, sibling, other = gem(), gem(), gem()
        opened = await played.reset(SEED)
        assert "Guess The Number" in opened[0]["content"]
        assert await sibling.reset(SEED) == opened
        await other.reset(SEED | {"seed": 4})
        turns = [await asyncio.gather(say(played, rf"\boxed{{{n}}}"), say(sibling, rf"\boxed{{{n}}}")) for n in (1, 2)]
        assert all(one == two for one, two in turns), "a group's episodes play the same game"
        assert (await say(other, "no number")).reward < 0, "gem's own word for it"

    run(episode())


FIRST_FREE = """
import re

def move(observation):
    free = re.findall(r"\\[(\\d)\\]", observation.rsplit("Available Moves", 1)[-1])
    return f"[{free[0]}]"
"""


@with_gyms
@pytest.mark.timeout(60)
def test_textarena_alone_and_against_an_opponent(tmp_path: Path) -> None:
    opponent = tmp_path / "opponent.py"
    opponent.write_text(FIRST_FREE)

    async def episodes() -> None:
        alone = env("textarena", "GuessTheNumber-v0", python=GYMS, answer_s=60.0)
        assert "between 1 and 20" in (await alone.reset(SEED))[0]["content"]
        said = (await say(alone, "[1]")).messages[0]["content"]
        assert "higher" in said
        assert "between 1 and 20" not in said, "only what is new"
        with pytest.raises(RuntimeError, match="number of players"):
            await env("textarena", "TicTacToe-v0", python=GYMS, answer_s=60.0).reset(SEED)
        two = env("textarena", "TicTacToe-v0", opponent=f"{opponent}:move", python=GYMS, answer_s=60.0)
        await two.reset(SEED)
        turns = [await say(two, f"[{cell}]") for cell in (4, 2, 6)]
        assert [turn.done for turn in turns] == [False, False, True]
        assert turns[-1].reward == 1.0, "4, 2 and 6 in a row; the opponent has 0 and 1"

    run(episodes())


@with_gyms
@pytest.mark.timeout(60)
def test_skyrl_gym_takes_the_row() -> None:
    async def episode() -> None:
        played = env("skyrl_gym", "gsm8k", python=GYMS, answer_s=60.0)
        prompt: list[Message] = [{"role": "user", "content": "1+1?"}]
        assert await played.reset({"id": "t", "prompt": prompt, "reward_spec": {"ground_truth": "2"}}) == prompt
        assert await say(played, "#### 2") == Turn(reward=1.0, done=True)

    run(episode())
