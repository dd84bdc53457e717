from itertools import combinations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.base import prompt_messages
from asyncrl.data.sources.lookup import WORDS, LookupSource, is_held_out


def pairs(tasks):
    return {frozenset(task["keys"]) for task in tasks}


def test_train_and_held_out_never_ask_about_the_same_two_words():
    for seed in (0, 7):
        source = LookupSource(seed=seed, held_out_size=500)
        held_out = [source.held_out(index) for index in range(500)]
        train = [source.task(index) for index in range(3000)]
        assert not pairs(train) & pairs(held_out)
        assert not {task["prompt"] for task in train} & {task["prompt"] for task in held_out}


def test_both_splits_hold_a_fair_share_of_all_pairs():
    kept = sum(is_held_out(*pair) for pair in combinations(WORDS, 2))
    assert 0.1 < kept / 276 < 0.3
    assert all(is_held_out(a, b) == is_held_out(b, a) for a, b in combinations(WORDS, 2))


@given(seed=st.integers(0, 2**31), index=st.integers(0, 10**9))
def test_a_task_depends_on_seed_and_index_alone(seed, index):
    task = LookupSource(seed=seed).task(index)
    assert task == LookupSource(seed=seed).task(index)
    first, second = (task["store"][key] for key in task["keys"])
    assert task["answer"] == str({"+": first + second, "-": first - second, "*": first * second}[task["sign"]])
    assert task["prompt"] == f"What is {task['keys'][0]} {task['sign']} {task['keys'][1]}?"
    assert msgpack.unpackb(msgpack.packb(task)) == task


def test_seeds_and_indices_differ():
    tasks = [LookupSource(seed=seed).task(index) for seed in range(3) for index in range(50)]
    assert len({task["id"] for task in tasks}) == 150
    assert len({str(sorted(task["store"].items())) for task in tasks}) == 150


def test_held_out_ends():
    source = LookupSource(held_out_size=3)
    assert source.held_out_size == 3
    assert source.train_size is None
    with pytest.raises(IndexError, match="held-out task 3"):
        source.held_out(3)


def test_a_prompt_becomes_messages_of_its_own():
    messages = [{"role": "user", "content": "hi"}]
    assert prompt_messages({"id": "0", "prompt": "hi"}) == messages
    got = prompt_messages({"id": "0", "prompt": messages})
    got[0]["content"] = "changed"
    assert messages[0]["content"] == "hi"
