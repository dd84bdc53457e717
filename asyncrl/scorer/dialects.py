"""How a server of the teacher is asked for the logprobs of a row's tokens, and how its answer is read. Pure.

    vllm     POST /v1/completions  prompt_logprobs: k       choices[0].prompt_logprobs: {id: {logprob, rank}}
    sglang   POST /generate        top_logprobs_num: k      meta_info.input_token_logprobs, input_top_logprobs

Both give the logprobs of the prompt's tokens at temperature 1, the first token's excepted, and sample one token more,
which is thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from asyncrl.errors import RunError
from asyncrl.wire.teacher_scores import TrajectoryScores

LOWEST = -9000.0
"""vLLM writes -9999 for minus infinity, which JSON does not have."""
MOST_WORDS = 1 << 31
"""Ids of words are 32-bit integers."""
Words = list[tuple[float, int]]
"""(logprob, word)"""


class TeacherUnusable(RunError):
    """What a server says cannot be trained on. Asking again would not help, so the run ends."""


@dataclass(frozen=True, slots=True)
class Token:
    """What a server said of one token."""

    sampled: float | None
    """None: it did not name the token itself."""
    top: Words
    """The most likely words, in any order."""


class Dialect(Protocol):
    about: str
    """Path that names the model and its context."""
    spare: int
    """Tokens of the context that a row cannot have."""
    more_words: str
    """How a server is made to give more words."""

    def request(self, tokens: Sequence[int], k: int, model: str) -> tuple[str, Any]:
        """(path, body)"""
        ...

    def read(self, reply: Any, tokens: Sequence[int], k: int) -> list[Token]:
        """The words of each token but the first. Raises KeyError, IndexError, TypeError or ValueError for another
        form."""
        ...


class VLLM:
    about, spare = "/v1/models", 1
    more_words = "start it with --max-logprobs {k}"

    def request(self, tokens: Sequence[int], k: int, model: str) -> tuple[str, Any]:
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
        return "/v1/completions", body

    def read(self, reply: Any, tokens: Sequence[int], k: int) -> list[Token]:
        given = reply["choices"][0]["prompt_logprobs"]
        found = []
        for token, words in zip(tokens[1:], given[1:], strict=True):
            own = words.get(str(token))
            # The token itself comes along where it is not among the k.
            top = [(float(x["logprob"]), int(word)) for word, x in words.items() if int(x.get("rank") or 1) <= k]
            found.append(Token(None if own is None else float(own["logprob"]), top))
        return found


class SGLang:
    about, spare = "/v1/models", 1
    more_words = "lower learner.teacher.k"

    def request(self, tokens: Sequence[int], k: int, model: str) -> tuple[str, Any]:
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
        }
        return "/generate", body

    def read(self, reply: Any, tokens: Sequence[int], k: int) -> list[Token]:
        meta = reply["meta_info"]
        own = meta["input_token_logprobs"]
        top = meta.get("input_top_logprobs") or [None] * len(own)
        found = []
        for token, (logprob, word, *_), words in zip(tokens[1:], own[1:], top[1:], strict=True):
            sampled = float(logprob) if word == token and logprob is not None else None
            found.append(Token(sampled, [(float(entry[0]), int(entry[1])) for entry in words or ()]))
        return found


DIALECTS: dict[str, Callable[[], Dialect]] = {"vllm": VLLM, "sglang": SGLang}


def scores_of(said: Sequence[Token], places: Sequence[int], k: int, where: str, remedy: str) -> TrajectoryScores:
    """The scores of the tokens at `places` of a row, of which `said` holds all but the first.

    `where` names the server, `remedy` how it gives more words. Raises TeacherUnusable.
    """
    ids, logprobs = np.zeros((len(places), k), np.int32), np.zeros((len(places), k), np.float32)
    sampled = np.zeros(len(places), np.float32)
    for row, place in enumerate(places):
        token = said[place - 1]
        if token.sampled is None:
            raise TeacherUnusable(
                f"{where} gave no logprob of token {place} of a row itself: it must give the prompt's own tokens "
                "beside the most likely ones, as vLLM and SGLang do (learner.teacher.dialect)."
            )
        best = sorted(token.top, key=lambda entry: (-entry[0], entry[1]))[:k]
        if len(best) < k:
            raise TeacherUnusable(
                f"{where} gave {len(best)} words for token {place} of a row, learner.teacher.k asks for {k}: "
                f"{remedy.format(k=k)}, or lower learner.teacher.k to what it gives."
            )
        logprobs_given = (token.sampled, *(logprob for logprob, _ in best))
        if unusable := [each for each in logprobs_given if not math.isfinite(each) or each <= LOWEST]:
            raise TeacherUnusable(
                f"{where} gave the logprob {unusable[0]} at token {place} of a row: its weights are damaged, or it "
                "truncates (top_p, top_k, a mask of allowed words). Serve the plain model, in a wider dtype."
            )
        if not all(0 <= word < MOST_WORDS for _, word in best):
            raise TeacherUnusable(
                f"{where} named the words {[word for _, word in best][:10]} for token {place} of a row, expected ids "
                "of a vocabulary: serve the teacher by vLLM or SGLang (learner.teacher.dialect)."
            )
        sampled[row] = token.sampled
        ids[row], logprobs[row] = [word for _, word in best], [logprob for logprob, _ in best]
    return TrajectoryScores(ids, logprobs, sampled)
