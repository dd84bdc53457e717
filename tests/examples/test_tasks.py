"""The tasks of examples/tasks: an oracle solves them, chance does not, and no text of a model breaks them."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.model import resolve_path
from asyncrl.plugins import resolve
from asyncrl.quickstart.demonstrations import play_demonstration
from asyncrl.quickstart.tokenizer import build_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "tasks"
NAMES = ("reversal", "wordle", "countdown", "frozen_lake", "chain")


def part(name, what):
    return resolve(f"{FOLDER / name}.py:{what}", None, "task")


@functools.cache
def config(name):
    return Config.load(FOLDER / f"{name}.yaml")


def played(name, act, task):
    """The total reward, whether it succeeded, and the conversation."""

    async def play():
        game, reward, rewards = part(name, "Game")(), 0.0, {}
        messages = await game.reset(task)
        while True:
            messages.append({"role": "assistant", "content": act(messages)})
            turn = await game.step(messages[-1])
            reward += turn.reward
            rewards |= turn.rewards
            if turn.done:
                return reward, rewards.get("success", reward) >= 1, messages
            messages += turn.messages

    return asyncio.run(play())


def tasks(name, count, seed=0):
    source = part(name, "Tasks")(seed=seed, held_out_size=count)
    return [source.task(index) for index in range(count)], [source.held_out(index) for index in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_gets_reward_1(name):
    oracle = part(name, "oracle")
    train, held_out = tasks(name, 100)
    for task in train + held_out:
        assert played(name, oracle, task)[:2] == (1.0, True), task


def test_the_oracle_finds_every_secret_from_every_first_guess():
    words, marks = part("wordle", "WORDS"), part("wordle", "marks")
    for secret in words:
        for first in set(words) - {secret}:
            task = {"prompt": f"{first} {marks(first, secret)}", "secret": secret}
            assert played("wordle", part("wordle", "oracle"), task)[1], (secret, first)


def test_a_chain_names_its_place_and_whether_the_way_is_right():
    task = next(task for task in tasks("chain", 100)[0] if len(task["pairs"]) == 3)
    game = part("chain", "Game")()
    assert game.reset_state == "0 True"

    async def states(choices):
        await game.reset(task)
        steps = zip(task["pairs"], task["places"], choices, strict=True)
        chosen = [pair[place if right else 1 - place] for pair, place, right in steps]
        return [(await game.step({"role": "assistant", "content": word})).state for word in chosen]

    assert asyncio.run(states([True, True, True])) == ["1 True", "2 True", "3 True"]
    assert asyncio.run(states([True, False, True])) == ["1 True", "2 False", "3 False"], (
        "one wrong word, wrong for good"
    )


def by_chance(name, rng):
    """An answer of the right form that knows nothing."""

    def act(messages):
        text = messages[-1]["content"]
        if name == "reversal":
            return "".join(rng.sample(text, len(text)))
        if name == "wordle":
            return rng.choice(part("wordle", "WORDS"))
        if name == "countdown":
            a, b, c = text.split(" = ")[0].split(" ")
            return f"{a}{rng.choice('+-')}{b}{rng.choice('+-')}{c}"
        if name == "frozen_lake":
            return rng.choice(list(part("frozen_lake", "MOVES")))
        words = text.replace(",", "").split(" ")
        return words[1] if words[0] == "answer" else rng.choice([words[0], words[2]])

    return act


@pytest.mark.parametrize(
    ("name", "most"), [("reversal", 0.25), ("wordle", 0.25), ("countdown", 0.35), ("frozen_lake", 0.1), ("chain", 0.35)]
)
def test_chance_gets_little(name, most):
    act = by_chance(name, random.Random(0))
    assert sum(played(name, act, task)[1] for task in tasks(name, 300)[1]) / 300 < most


@pytest.mark.parametrize("name", NAMES)
def test_a_demonstration_succeeds_now_and_then(name):
    flawed, rng = part(name, "flawed"), random.Random(0)
    share = sum(played(name, lambda messages: flawed(messages, rng), task)[1] for task in tasks(name, 200)[0]) / 200
    assert 0.1 < share < 0.7


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_draws_the_same_tasks(name):
    assert tasks(name, 30) == tasks(name, 30)
    assert tasks(name, 30) != tasks(name, 30, seed=1)
    train, held_out = tasks(name, 50)
    assert len({task["id"] for task in train + held_out}) == 100
    assert msgpack.unpackb(msgpack.packb(train)) == train


KEYS = {
    "reversal": lambda task: task["prompt"],
    "wordle": lambda task: (task["secret"], task["first"]),
    "countdown": lambda task: (sorted(task["prompt"].split(" = ")[0]), task["prompt"].split(" = ")[1]),
    "frozen_lake": lambda task: task["holes"],
    "chain": lambda task: task["pairs"][0],
}


@pytest.mark.parametrize("name", NAMES)
def test_no_held_out_task_is_trained_on_whatever_the_seed(name):
    train, held_out = zip(*(tasks(name, 300, seed) for seed in (0, 1)), strict=True)
    keys = [{json.dumps(KEYS[name](task)) for seed in side for task in seed} for side in (train, held_out)]
    assert len(keys[1]) > 30
    assert keys[0].isdisjoint(keys[1])


def test_a_chain_has_a_long_tail():
    lengths = sorted(len(task["pairs"]) for task in tasks("chain", 1000)[0])
    assert lengths[500] == 3
    assert lengths[990] >= 12
    assert lengths[-1] <= 24


def test_every_turn_of_the_lake_has_its_reward():
    async def rewards(moves):
        game = part("frozen_lake", "Game")()
        await game.reset({"prompt": "holes b2 c3 d1. at a1", "holes": ["b2", "c3", "d1"]})
        return [await game.step({"content": move}) for move in moves]

    moves = ["up", "jump", "right", "right", "right", "down", "down", "down"]
    turns = asyncio.run(rewards(moves))
    assert [turn.reward for turn in turns] == [-0.1, -0.1, 0, 0, 0, 0, 0, 1]
    assert [turn.done for turn in turns] == [False] * 7 + [True]
    assert turns[-1].rewards == {"success": 1.0}
    fell = asyncio.run(rewards(["right", "down"]))[-1]
    assert (fell.reward, fell.done, fell.rewards) == (-0.5, True, {"success": 0.0})
    lost = asyncio.run(rewards(["left"] * 12))
    assert [turn.done for turn in lost] == [False] * 11 + [True]


@pytest.mark.parametrize("name", NAMES)
@given(answers=st.lists(st.text() | st.sampled_from(["right", "ape", "1+1+1", "x" * 100_000, "9" * 5000])))
@settings(max_examples=40, deadline=None)
def test_any_text_of_a_model_is_answered_in_bounds(name, answers):
    said = iter(answers)
    reward, success, messages = played(name, lambda _: next(said, "?"), tasks(name, 1)[0][0])
    assert -2 < reward <= 1
    assert success == (reward == 1)
    assert len(messages) <= 2 * config(name).env.max_turns
    assert all(len(message["content"]) < 100 for message in messages if message["role"] == "user")


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_episodes_fit_the_config(name):
    """Nothing is unknown to the tokenizer, and the oracle's turns and rows are within the limits."""
    limits, tokenizer = config(name), build_tokenizer(part(name, "PIECES"))
    oracle = part(name, "oracle")
    train, held_out = tasks(name, 50)
    drawn = train + held_out
    if name == "chain":
        most = part("chain", "LONGEST")
        pairs = [["ant", "bat"]] * most
        drawn = [{"prompt": "ant or bat, second", "pairs": pairs, "places": [1] * most, "answer": 10, "wrong": 11}]
    for task in drawn:
        turns = []

        def act(messages, turns=turns):
            turns.append(oracle(messages))
            return turns[-1]

        ids, _, success = asyncio.run(play_demonstration(part(name, "Game")(), task, act, tokenizer))
        assert success
        assert tokenizer.unk_token_id not in ids
        assert len(ids) <= limits.env.max_tokens
        assert len(turns) <= limits.env.max_turns
        assert max(len(tokenizer.encode(turn)) + 1 for turn in turns) <= limits.actors.max_new_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_model_is_refused_and_the_script_named(name):
    loaded = Config.load(FOLDER / f"{name}.yaml", {"model.path": "./nowhere"})
    with pytest.raises(
        ConfigError, match=f"no such folder: make it with `python examples/tasks/make_models.py {name}`"
    ):
        resolve_path(loaded.model)
