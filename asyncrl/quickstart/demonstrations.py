"""Flawed demonstrations: they teach the form of an episode, and errors for reinforcement learning to undo.

At every choice (which key, which sign, which answer, whether to look anything up at all) the demonstrator errs
with probability `flaw`, and continues as if nothing had happened. Besides, it has a habit: with probability `habit` it
adds, whatever sign the question shows. Above one half, the habit is what a model that imitates it does greedily.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerFast

from asyncrl.actors.envs.lookup import LookupEnv
from asyncrl.actors.envs.protocol import Env
from asyncrl.data.base import Message, Task
from asyncrl.data.demonstrations.chat import Chat
from asyncrl.data.sources.lookup import SIGNS, WORDS
from asyncrl.quickstart.warm_up import Row
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


async def demonstrate(
    task: Task, rng: random.Random, flaw: float, habit: float, tokenizer: PreTrainedTokenizerFast
) -> Row:
    """One demonstrated episode of the quickstart."""
    return await play_demonstration(LookupEnv(max_turns=8), task, acting(task, rng, flaw, habit), tokenizer)


def acting(task: Task, rng: random.Random, flaw: float, habit: float) -> Callable[[Sequence[Message]], str]:
    """The demonstrator of a task of the quickstart: each assistant turn, from the conversation so far."""
    demonstrator = FlawedDemonstrator(task, rng, flaw, habit)

    def act(messages: Sequence[Message]) -> str:
        if messages[-1]["role"] == "tool":
            demonstrator.observe(messages[-1:])
        return demonstrator.act()

    return act


async def play_demonstration(
    environment: Env, task: Task, act: Callable[[Sequence[Message]], str], tokenizer: PreTrainedTokenizerFast
) -> Row:
    """(ids, labels, success) of one episode in which `act` gives each assistant turn, from the conversation so far.

    Labels are -100 at tokens that are not the demonstrator's; the episode succeeds if its last turn is rewarded. Raises
    ValueError for a chat template that changes earlier tokens.
    """
    chat, success = await play_chat(environment, task, act, tokenizer)
    rows = rows_of(TemplateRenderer(tokenizer), chat, None)
    if len(rows) != 1:
        raise ValueError("the tokenizer's chat template is not prefix-stable; see quickstart/tokenizer.py")
    (row,) = rows
    return row.ids, [token if shown else -100 for token, shown in zip(row.ids, row.mask, strict=True)], success


async def play_chat(
    environment: Env, task: Task, act: Callable[[Sequence[Message]], str], tokenizer: PreTrainedTokenizerFast
) -> tuple[Chat, bool]:
    """The same episode as a chat, and whether it succeeded."""
    renderer = TemplateRenderer(tokenizer)
    messages = await environment.reset(task)
    tools = [dict(tool.schema) for tool in environment.tools]
    while True:
        sampled = tokenizer.encode(act(messages) + tokenizer.eos_token, add_special_tokens=False)
        messages.append(renderer.parse(sampled))
        turn = await environment.step(messages[-1])
        if turn.done:
            return Chat(messages, tools), turn.reward > 0
        messages.extend(turn.messages)
