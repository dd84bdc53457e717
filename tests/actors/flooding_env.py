"""An environment whose second message leaves no room for an answer in a model of 256 positions."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.actors.envs.protocol import Message, Task, Tool, Turn


class FloodingEnv:
    tools: Sequence[Tool] = ()

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": "fox"}]

    async def step(self, message: Message) -> Turn:
        return Turn([{"role": "user", "content": "fox owl " * 200}], reward=1.0)

    async def close(self) -> None: ...
