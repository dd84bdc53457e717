"""An environment whose second message leaves no room for an answer in a model of 256 positions."""

from __future__ import annotations

from asyncrl.actors.envs.protocol import Environment, Message, Task, Turn


class FloodingEnv(Environment):
    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": "fox"}]

    async def step(self, message: Message) -> Turn:
        return Turn(messages=[{"role": "user", "content": "fox owl " * 200}], reward=1.0)
