from __future__ import annotations

import random

import pytest

from asyncrl.config.config import Config
from asyncrl.model import load_tokenizer
from asyncrl.tracking.rollouts.text import TokenText, token_text


def of_bytes(ids: list[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode(errors="replace")


def test_a_character_of_several_tokens_belongs_to_its_last() -> None:
    text, ends = TokenText(of_bytes).split(list("aé😀b".encode()))
    assert text == "aé😀b"
    assert ends == [1, 1, 2, 2, 2, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_are_split(seed: int) -> None:
    ids = [*random.Random(seed).randbytes(60), *"ende 😀".encode()]
    text, ends = TokenText(of_bytes).split(ids)
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    assert len(ends) == len(ids)
    assert text.endswith("ende 😀")


def test_an_id_that_the_tokenizer_does_not_have_is_shown_as_its_number() -> None:
    text, ends = TokenText(lambda ids: "".join("ab"[id] for id in ids)).split([0, 7, 1])
    assert (text, ends) == ("a<7>b", [1, 4, 5])
    assert TokenText(of_bytes).split([]) == ("", [])


def test_the_text_of_a_real_tokenizer() -> None:
    tokenizer = load_tokenizer(Config().model if Config().model.path == "quickstart" else
                               Config.model_validate({"model": {"path": "quickstart"}}).model)  # fmt: skip
    ids = tokenizer.encode("3 + 4 = ?", add_special_tokens=False)
    text, ends = token_text(tokenizer).split([*ids, int(tokenizer.eos_token_id)])
    assert text == tokenizer.decode([*ids, int(tokenizer.eos_token_id)])
    assert str(tokenizer.eos_token) == text[ends[-2] :]
