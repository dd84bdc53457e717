from __future__ import annotations

import random
from pathlib import Path

import pytest

from asyncrl.config.config import Config
from asyncrl.errors import ConfigError
from asyncrl.model import load_tokenizer
from asyncrl.tracking.rollouts.text import TokenText, model_text, token_text


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


MODEL = Config.model_validate({"model": {"path": "quickstart"}}).model


def test_the_text_of_a_real_tokenizer() -> None:
    tokenizer = load_tokenizer(MODEL)
    ids = tokenizer.encode("<|im_start|>user\n3 + 4 = ?<|im_end|>\n", add_special_tokens=False)
    ids = [*ids, int(tokenizer.eos_token_id)]
    text, ends = token_text(tokenizer).split(ids)
    assert text == tokenizer.decode(ids)
    assert str(tokenizer.eos_token) == text[ends[-2] :]
    assert model_text(MODEL).split(ids) == (text, ends)
    every = list(range(len(tokenizer)))
    assert model_text(MODEL).split(every) == token_text(tokenizer).split(every)
    assert model_text(MODEL).split([ids[0], 10**6]) == (text[: ends[0]] + "<1000000>", [ends[0], ends[0] + 9])


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer that can be read"):
        model_text(MODEL.model_copy(update={"path": str(tmp_path)}))
