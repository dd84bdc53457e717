"""Stand-ins for what an episode talks to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.actors.engines.protocol import Generation, PromptTooLong, Sampling
from asyncrl.actors.envs.protocol import Tool, Turn
from asyncrl.data.base import Message, Task
from asyncrl.rendering.template import ToolSchema
from asyncrl.trajectory import Ticket, TicketId
from asyncrl.weights.protocol import Weights

STOP = 0


def ticket(
    index: int = 0,
    *,
    group: int = 0,
    kind: Any = "train",
    seed: int = 7,
    min_version: tuple[int, int] = (0, 0),
    **task: Any,
) -> Ticket:
    task = {"id": f"task{group}", "prompt": "Hello"} | task
    temperature = 1.0 if kind == "train" else 0.0
    return Ticket(TicketId(0, group, index), 1, kind, task, min_version, 4, temperature, seed, 30.0)


class FakeEngine:
    """Says what `script` says; the k-th token it samples has logprob -k / 1000 and version `held_version[1]`."""

    def __init__(self, script: Callable[[str, Sequence[int], Sampling], Sequence[int]], max_tokens: int = 1000) -> None:
        self.held_version = (0, 0)
        self.calls: list[tuple[str, list[int], Sampling]] = []
        self.said: list[int] = []
        self._script, self._max_tokens = script, max_tokens
        self.log: list[str] = []
        self.gate: asyncio.Event | None = None

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        self.log.append("close")

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        if len(prompt) >= self._max_tokens:
            raise PromptTooLong(f"prompt has {len(prompt)} tokens, env.max_tokens is {self._max_tokens}")
        self.calls.append((request, list(prompt), sampling))
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        ids = list(self._script(request, prompt, sampling))
        ids = ids[: min(sampling.max_new_tokens, self._max_tokens - len(prompt))]
        at = len(self.said)
        self.said += ids
        logprobs = -np.arange(at, at + len(ids), dtype=np.float32) / 1000
        stopped = ids[-1] in sampling.stop_token_ids
        return Generation(
            np.array(ids, np.int32),
            logprobs,
            np.full(len(ids), self.held_version[1], np.int32),
            "stop" if stopped else "length",
        )

    async def abort(self, request: str) -> None:
        self.log.append(f"abort {request}")

    async def check(self, weights: Weights) -> None:
        return None

    async def pause(self, recompute_kv: bool) -> None:
        self.log.append(f"pause {recompute_kv}")

    async def load(self, weights: Weights) -> None:
        self.held_version = (weights.id.branch, weights.id.version)
        self.log.append(f"load {self.held_version}")

    async def resume(self) -> None:
        self.log.append("resume")

    def load_stats(self) -> Mapping[str, float]:
        return {"running": 0.0, "waiting": 0.0, "kv_use": 0.0, "generated": float(len(self.said)), "paused_s": 0.0}


class FakeRenderer:
    """One id per character. The tail of a user message is None: there, the prefix breaks."""

    stop_token_ids = (STOP,)
    vocabulary = 128

    def render_initial(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        return [ord(c) for m in messages for c in f"<{m['role']}>{m['content']}"] + [ord(">")]

    def render_tail(
        self,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        closed: bool = True,
        row: Sequence[int] = (),
        sampled: int = 0,
    ) -> list[int] | None:
        if any(m["role"] == "user" for m in new_messages):
            return None
        return ([] if closed else [STOP]) + self.render_initial(new_messages, tools)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        return {"role": "assistant", "content": "".join(chr(i) for i in sampled_ids if i != STOP)}


class FakeEnv:
    """Answers what `turns` holds, one after the other; an exception among them is raised."""

    tools: Sequence[Tool] = ()

    def __init__(self, turns: Sequence[Turn | Exception], prompt: str = "Hello") -> None:
        self._turns = iter(turns)
        self._prompt = prompt
        self.task: Task = {}
        self.heard: list[Message] = []
        self.closed = 0

    async def reset(self, task: Task) -> list[Message]:
        self.task = task
        return [{"role": "system", "content": self._prompt}]

    async def step(self, message: Message) -> Turn:
        self.heard.append(message)
        turn = next(self._turns)
        if isinstance(turn, Exception):
            raise turn
        return turn

    async def close(self) -> None:
        self.closed += 1


def tool_says(text: str) -> Turn:
    return Turn(messages=[{"role": "tool", "content": text}])


SAID = [65, 66, 67, 68, STOP]


class CutEngine(FakeEngine):
    """Has said the first `said` tokens of an answer when it is aborted."""

    def __init__(self, said: int) -> None:
        super().__init__(lambda *_: SAID)
        self._cut = said
        self.running: dict[str, asyncio.Event] = {}

    async def generate(self, request: str, prompt: Any, sampling: Sampling) -> Generation:
        self.running[request] = asyncio.Event()
        await self.running[request].wait()
        whole = await super().generate(request, prompt, sampling)
        n = self._cut
        return Generation(whole.token_ids[:n], whole.logprobs[:n], whole.versions[:n], "abort")

    async def abort(self, request: str) -> None:
        self.running[request].set()
