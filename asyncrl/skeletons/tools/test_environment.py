"""Plays episodes by hand, without a model: python test_environment.py, or pytest."""

import asyncio
from random import Random

from environment import Shop, calculate, lookup
from score import score
from tasks import PRICES, THINGS, task


def call(name, **arguments):
    """A message of the policy that calls one tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


async def play(given, messages):
    """The last turn of an episode in which the policy says `messages`."""
    shop = Shop(score=score)
    await shop.reset(given)
    for message in messages:
        turn = await shop.step(message)
    return turn


def test_the_right_answer_is_rewarded_and_a_wrong_one_is_not():
    given = {"prompt": "What is fox + owl?", "ground_truth": "92"}
    calls = [call("lookup", key="fox"), call("lookup", key="owl"), call("calculate", expression="38 + 54")]
    assert asyncio.run(play(given, [*calls, {"role": "assistant", "content": "92"}])).reward == 1
    assert asyncio.run(play(given, [*calls, {"role": "assistant", "content": "16"}])).reward == 0


def test_a_wrong_call_is_told_to_the_policy():
    turn = asyncio.run(play({"prompt": "?", "ground_truth": "0"}, [call("lookup", key="unicorn")]))
    assert not turn.done
    assert turn.messages[0]["content"] == "error: no key unicorn"


def test_every_task_has_an_answer_that_the_tools_give():
    for seed in range(20):
        made = task(Random(seed))
        first, sign, second = made["prompt"].removeprefix("What is ").removesuffix("?").split()
        assert calculate(f"{lookup(first)} {sign} {lookup(second)}") == made["ground_truth"]
    assert set(PRICES) == set(THINGS)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"passed: {name}")
