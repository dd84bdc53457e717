"""Environments that run in workers too, which start at once because nothing heavy is loaded here."""

from __future__ import annotations

from asyncrl.actors.envs.protocol import Environment, Message, Task, Turn
from tests.actors.episodes.recorded.counters import Snapshots


class Plain(Environment):
    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": "?"}]

    async def step(self, message: Message) -> Turn:
        return Turn(done=True)


class Told(Plain):
    heard: Message | None = None

    async def reset(self, task: Task, interrupted: Message | None = None) -> list[Message]:
        self.heard = interrupted
        return [{"role": "system", "content": f"interrupted: {interrupted and interrupted['content']}"}]


class Six(Snapshots):
    def __init__(self) -> None:
        super().__init__(3)
