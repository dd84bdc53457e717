"""The text of token ids, and which part of it each token is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.model import load_tokenizer, resolve_path

_UNFINISHED = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character."""
_MOST_UNFINISHED = 16
"""Tokens that may share one character; past them the bytes are of none."""


class TokenText:
    """Splits the text of ids by token. Each id alone is decoded once; most rows need no more than that.

    >>> words = {1: "a", 2: "b c"}
    >>> TokenText(lambda ids: "".join(words[i] for i in ids)).split([2, 1])
    ('b ca', [3, 4])
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode`: the tokenizer's, which keeps special tokens and every space."""
        self._decode = decode
        self._alone: dict[int, str] = {}

    def split(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text, and for each of `ids` the number of its characters up to and with that token."""
        pieces = [self._piece(id) for id in ids]
        text = self._text(ids)
        if "".join(pieces) != text:
            # A character of several tokens, or a tokenizer whose words begin otherwise at the start of a text.
            pieces = self._in_context(ids)
            text = "".join(pieces)
        return text, list(itertools.accumulate(map(len, pieces)))

    def _piece(self, id: int) -> str:
        if id not in self._alone:
            self._alone[id] = self._text([id])
        return self._alone[id]

    def _text(self, ids: Sequence[int]) -> str:
        try:
            return self._decode(ids)
        except (IndexError, KeyError, OverflowError, TypeError, ValueError):  # an id that the tokenizer does not have
            return "".join(map(self._piece, ids)) if len(ids) > 1 else f"<{ids[0]}>" if len(ids) else ""

    def _in_context(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text of the few before it."""
        pieces, window, begun = [], 0, 0
        for at in range(len(ids)):
            before, now = self._text(ids[window:begun]), self._text(ids[window : at + 1])
            last = at + 1 == len(ids) or at - begun >= _MOST_UNFINISHED
            if now.endswith(_UNFINISHED) and not last:
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            window, begun = begun, at + 1
        return pieces


def token_text(tokenizer: object) -> TokenText:
    """The text of tokens by a tokenizer of transformers."""

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(  # type: ignore[attr-defined]
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    return TokenText(decode)


def model_text(model: ModelConfig) -> TokenText:
    """The text of tokens by a model's tokenizer file, without transformers and torch, whose import takes seconds; with
    them where there is no such file. Raises ConfigError."""
    from tokenizers import Tokenizer

    file = resolve_path(model) / "tokenizer.json"
    if not file.is_file():
        return token_text(load_tokenizer(model))
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"{file} is no tokenizer that can be read ({error}): put the model's own there.") from error
    names: dict[int, str | None] = {}

    def decode(ids: Sequence[int]) -> str:
        for id in ids:
            if id not in names:
                names[id] = tokenizer.id_to_token(id)
            if names[id] is None:
                raise IndexError(id)  # it would be passed over
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        return text

    return TokenText(decode)
