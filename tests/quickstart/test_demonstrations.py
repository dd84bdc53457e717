import asyncio
import random

from asyncrl.data.sources.lookup import LookupSource
from asyncrl.quickstart.build import FLAW, HABIT
from asyncrl.quickstart.demonstrations import demonstrate
from asyncrl.quickstart.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


def rows(count, flaw=FLAW, habit=HABIT, seed=0):
    async def play():
        source, rng = LookupSource(seed=seed), random.Random(seed)
        return [await demonstrate(source.task(index), rng, flaw, habit, TOKENIZER) for index in range(count)]

    return asyncio.run(play())


def test_without_flaws_every_demonstration_succeeds():
    assert all(success for _, _, success in rows(50, flaw=0.0, habit=0.0))


def test_with_flaws_most_fail():
    played = rows(400)
    assert 0.3 < sum(success for _, _, success in played) / 400 < 0.5
    lengths = [len(ids) for ids, _, _ in played]
    assert max(lengths) <= 140
    assert sum(lengths) / 400 < 80


def test_the_habit_is_to_add():
    """With the habit alone, the tasks whose sign is not + fail in its share of the cases, and no others."""
    source = LookupSource(seed=0)
    adds = [source.task(index)["sign"] == "+" for index in range(300)]
    succeeded = [success for _, _, success in rows(300, flaw=0.0, habit=0.6)]
    assert all(success for add, success in zip(adds, succeeded, strict=True) if add)
    others = [success for add, success in zip(adds, succeeded, strict=True) if not add]
    assert 0.3 < sum(others) / len(others) < 0.5


def test_only_what_the_demonstrator_said_is_learned():
    for ids, labels, _ in rows(30):
        assert len(ids) == len(labels)
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
        said = TOKENIZER.decode([label for label in labels if label != -100])
        assert "tool\n" not in said
        assert "user\n" not in said
        assert ids[-1] == labels[-1] == TOKENIZER.eos_token_id


def test_the_same_seed_demonstrates_the_same():
    assert rows(10, seed=1) == rows(10, seed=1)
    assert rows(10, seed=1) != rows(10, seed=2)
