"""Flawed demonstrations: they teach the form of an episode, and errors for reinforcement learning to undo.

At every choice (which key, which sign, which answer, whether to look anything up at all) the demonstrator errs
with probability `flaw`, and continues as if nothing had happened. Besides, it has a habit: with probability `habit` it
adds, whatever sign the question shows. Above one half, the habit is what a model that imitates it does greedily.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from asyncrl.actors.envs.lookup import LookupEnv
from asyncrl.data.base import Message, Task
from asyncrl.data.demonstrations.chat import Chat
from asyncrl.data.sources.lookup import SIGNS, WORDS
from asyncrl.rendering.demonstrations import rows_of
from asyncrl.rendering.template import TemplateRenderer
from asyncrl.rendering.tool_calls import Hermes


class FlawedDemonstrator:
    """Plays one task, turn by turn."""

    def __init__(self, task: Task, rng: random.Random, flaw: float, habit: float) -> None:
        self._task, self._rng, self._flaw, self._habit = task, rng, flaw, habit
        self._pending: list[str] = list(task["keys"])
        self._values: list[str] = []
        self._result: str | None = None

    def act(self) -> str:
        """The text of the next assistant turn."""
        if self._result is not None:
            return self._result if self._right() else self._rng.choice([*self._values, self._number()])
        if self._pending:
            key = self._pending[0]
            if self._right():
                return Hermes().write("lookup", {"key": key})
            if self._rng.random() < 0.3:
                return self._number()
            other = [word for word in self._task["keys"] if word != key] * len(WORDS) + list(WORDS)
            return Hermes().write("lookup", {"key": self._rng.choice(other)})
        sign = SIGNS[0] if self._rng.random() < self._habit else self._task["sign"]
        if not self._right():
            sign = self._rng.choice([other for other in SIGNS if other != sign])
        return Hermes().write("calculate", {"expression": f"{self._values[0]} {sign} {self._values[1]}"})

    def observe(self, results: Sequence[Message]) -> None:
        """Record what the tool returned; a key that is not in the store is looked up again."""
        text: str = results[0]["content"]
        if text.startswith("error"):
            return
        if self._pending:
            self._pending.pop(0)
            self._values.append(text)
        else:
            self._result = text

    def _right(self) -> bool:
        return self._rng.random() >= self._flaw

    def _number(self) -> str:
        return str(self._rng.randint(10, 198))


async def play(task: Task, rng: random.Random, flaw: float, habit: float) -> tuple[Chat, bool]:
    """One demonstrated episode as a chat, and whether it succeeded."""
    environment = LookupEnv(max_turns=8)
    demonstrator = FlawedDemonstrator(task, rng, flaw, habit)
    messages = await environment.reset(task)
    tools = [tool.schema for tool in environment.tools]
    while True:
        messages.append(_message(demonstrator.act()))
        turn = await environment.step(messages[-1])
        if turn.done:
            return Chat(messages, [dict(tool) for tool in tools]), turn.reward > 0
        messages.extend(turn.messages)
        demonstrator.observe(turn.messages)


def _message(text: str) -> Message:
    content, calls = Hermes().parse(text)
    message: Message = {"role": "assistant", "content": content}
    return message | ({"tool_calls": calls} if calls else {})


async def demonstrate(
    task: Task, rng: random.Random, flaw: float, habit: float, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int], bool]:
    """(ids, labels, success) of one demonstrated episode; labels are -100 at tokens that are not the demonstrator's."""
    renderer = TemplateRenderer(tokenizer)
    chat, success = await play(task, rng, flaw, habit)
    (row,) = rows_of(renderer, chat, None)  # the quickstart's template never changes what it has written
    labels = [token if shown else -100 for token, shown in zip(row.ids, row.mask, strict=True)]
    return row.ids, labels, success
