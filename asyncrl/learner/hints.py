"""What a teacher that is the policy itself is shown: text at the end of the user's message, as tokens within the rows.

    the policy reads     ... <user> What is fox + owl?                                <end> <assistant> answer
    the teacher reads    ... <user> What is fox + owl? The correct answer is: 41 ...  <end> <assistant> answer

The tokens of the answer are the row's own: the teacher scores the same ones, behind another prompt. A row that goes on
from the prompt of the trajectory's first row has the text there, any other at the end of its own prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np

from asyncrl.config import Config
from asyncrl.config.learner import PLACE, TeacherConfig
from asyncrl.data.base import Message
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.batch.hints import Place
from asyncrl.model import load_tokenizer, positions
from asyncrl.rendering.build import build_renderer
from asyncrl.rendering.template import Renderer
from asyncrl.trajectory import Row, Trajectory

TEXTS = {
    "answer": f"\n\nThe correct answer is: {PLACE}\nNow answer with a response of your own.",
    "feedback": f"\n\nFeedback on an earlier attempt: {PLACE}\nNow answer the question correctly.",
}
"""By `learner.teacher.shown`, where `shown_as` is empty."""


class HintRows:
    """Finds the hints of a trajectory's rows."""

    def __init__(self, given: TeacherConfig, encode: Callable[[str], list[int]], closing: Sequence[int]) -> None:
        """`encode` makes tokens of text; `closing`: the tokens of every prompt behind the user's message."""
        before, _, after = (given.shown_as or TEXTS[given.shown]).partition(PLACE)
        self._before, self._after = encode(before), encode(after)
        self._encode, self._closing, self._most = encode, np.array(closing, np.int32), given.shown_tokens

    @classmethod
    def of(cls, config: Config) -> HintRows | None:
        """None for a run without hints. Raises ConfigError where they may make a row too long, or have no place."""
        given = config.learner.teacher
        if not given.hints:
            return None
        tokenizer = load_tokenizer(config.model)

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids

        made = cls(given, encode, closing_of(build_renderer(config)))
        longest, most = config.env.max_tokens + made.longest, positions(config.model)
        if most is not None and longest > most:
            raise ConfigError(
                f"learner.teacher.shown_tokens is {given.shown_tokens} and env.max_tokens {config.env.max_tokens}: the "
                f"teacher's row may have {longest} tokens, with what it is shown, and model.path has {most} positions. "
                "Lower one of them."
            )
        return made

    @property
    def longest(self) -> int:
        """Most tokens of one hint."""
        return len(self._before) + self._most + len(self._after)

    def __call__(self, t: Trajectory) -> list[Place]:
        """Of each row. Raises RunError for a prompt in which it has no place."""
        if not t.hint:
            return [((), 0) for _ in t.rows]
        ids = [*self._before, *self._encode(t.hint)[: self._most], *self._after]
        first = t.rows[0]
        place = self._place(t, first)
        return [(ids, place if _begins(row, first, place) else self._place(t, row)) for row in t.rows]

    def _place(self, t: Trajectory, row: Row) -> int:
        """Behind the last message of the row's prompt."""
        prompt = int(row.mask.argmax())
        place = prompt - len(self._closing)
        if place < 1 or not np.array_equal(row.token_ids[place:prompt], self._closing):
            raise RunError(
                f"trajectory {t.id} of task {t.task_id} has a prompt that does not end as the chat template ends a "
                "user's message, so that there is no place for what learner.teacher.shown shows: set shown nothing "
                "with an update_rate below 1, or use an environment whose first messages end with the user's."
            )
        return place


def closing_of(renderer: Renderer) -> list[int]:
    """The tokens that the chat template writes behind a user's message, up to the assistant's turn. Raises ConfigError
    where there are none."""
    one, other = (_prompt(renderer, {"role": "user", "content": text}) for text in ("How many?", "Go on, please"))
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
    closing = [token for token, _ in alike][::-1]
    if not closing:
        raise ConfigError(
            "learner.teacher.shown adds text to the user's message, and the chat template of model.path writes nothing "
            "behind that: use another model, or set shown nothing with an update_rate below 1."
        )
    return closing


def _prompt(renderer: Renderer, message: Message) -> list[int]:
    return renderer.render_initial([message], [])


def _begins(row: Row, first: Row, place: int) -> bool:
    return len(row) > place and np.array_equal(row.token_ids[:place], first.token_ids[:place])
