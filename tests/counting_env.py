"""Environments, and an agent, that count what they do, and tell of every step, in whichever process."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncrl

TURNS = 20


class Counting(asyncrl.Environment):
    """A turn's reward is the number of actions on the state so far; done after TURNS. A step sleeps, as tools do."""

    def __init__(self, log: str, sleep_s: float = 0.1) -> None:
        self._log, self._sleep_s = log, sleep_s
        self._count = 0

    async def reset(self, task: Any) -> list[dict[str, Any]]:
        self._key = f"{task['id']}/{task['episode']}"
        return [{"role": "user", "content": "count"}]

    async def step(self, message: Any) -> asyncrl.Turn:
        self._count += 1
        note(self._log, f"{self._key} {self._count} {message['tokens']}", message["content"])
        await asyncio.sleep(self._sleep_s)
        done = self._count == TURNS
        messages = [] if done else [{"role": "tool", "content": str(self._count)}]
        return asyncrl.Turn(messages=messages, reward=float(self._count), done=done)


class WithSnapshots(Counting):
    async def snapshot(self) -> bytes:
        return str(self._count).encode()

    async def restore(self, state: bytes) -> None:
        self._count = int(state)


class Again(Counting):
    replayable = True


async def agent(task: Any, client: Any, *, log: str, sleep_s: float = 0.1) -> float:
    """Counts its requests, with a tool that sleeps behind each."""
    messages = [{"role": "user", "content": "count"}]
    for n in range(1, TURNS + 1):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        content = reply.choices[0].message.content
        note(log, f"{task['id']}/{task['episode']} {n} {reply.usage.completion_tokens}", content)
        await asyncio.sleep(sleep_s)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": str(n)}]
    return float(TURNS)


agent.replayable = True  # type: ignore[attr-defined]


def compare(task: Any, answers: Sequence[Any]) -> list[float]:
    """A group score: the place of each answer among all of its group."""
    return [float(place) for place, _ in enumerate(answers)]


def note(log: str, about: str, content: str | None) -> None:
    """Adds a line to the log of what was carried out."""
    said = hashlib.blake2b((content or "").encode(), digest_size=8).hexdigest()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, f"{about} {said} {os.getpid()}\n".encode())
    os.close(file)


@dataclass(frozen=True)
class Step:
    """A line of the log: an action that was carried out."""

    key: str
    """Of the episode."""
    count: int
    tokens: int
    said: str


def carried_out(log: Path) -> list[Step]:
    """The last line may be under way."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [Step(key, int(n), int(tokens), said) for key, n, tokens, said, _ in (line.split() for line in lines)]


def sampled_again(steps: Sequence[Step], explained: Mapping[tuple[str, int], int] | None = None) -> int:
    """Tokens of turns that were sampled more than once: another text at the same place of the same episode.
    `explained`: by place, how many further texts a new branch, or a host that was lost, explains."""
    said: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for step in steps:
        said[step.key, step.count][step.said] = step.tokens
    return sum(
        sum(texts.values()) - max(texts.values())
        for place, texts in said.items()
        if len(texts) > 1 + (explained or {}).get(place, 0)
    )


def carried_out_again(steps: Sequence[Step]) -> int:
    """Actions that were carried out once more, in a copy of the environment that took the place of another."""
    return len(steps) - len({(step.key, step.count, step.said) for step in steps})
