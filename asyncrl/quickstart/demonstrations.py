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
from asyncrl.data.sources.lookup import SIGNS, WORDS
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


async def demonstrate(
    task: Task, rng: random.Random, flaw: float, habit: float, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int], bool]:
    """(ids, labels, success) of one demonstrated episode; labels are -100 at tokens that are not the demonstrator's."""
    environment = LookupEnv(max_turns=8)
    renderer = TemplateRenderer(tokenizer)
    demonstrator = FlawedDemonstrator(task, rng, flaw, habit)
    messages = await environment.reset(task)
    tools = [tool.schema for tool in environment.tools]
    ids = renderer.render_initial(messages, tools)
    labels = [-100] * len(ids)
    while True:
        sampled = tokenizer.encode(demonstrator.act() + tokenizer.eos_token, add_special_tokens=False)
        messages.append(renderer.parse(sampled))
        ids, labels = ids + sampled, labels + sampled
        turn = await environment.step(messages[-1])
        if turn.done:
            return ids, labels, turn.reward > 0
        tail = renderer.render_tail(messages, turn.messages, tools)
        if tail is None:
            raise ValueError("the quickstart's chat template is not prefix-stable; see quickstart/tokenizer.py")
        messages.extend(turn.messages)
        ids, labels = ids + tail, labels + [-100] * len(tail)
        demonstrator.observe(turn.messages)
