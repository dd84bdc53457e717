"""Environments whose episodes can go on; they load nothing heavy, so that a process of environments starts at once."""

from __future__ import annotations

import numpy as np

from asyncrl.actors.envs.protocol import Message, Task, Turn


class Counter:
    """Counts the actions that were carried out on its state; done after `turns`."""

    tools = ()
    reset_state = "begin"
    carried_out = 0
    """Steps of all instances."""

    def __init__(self, turns: int = 6, role: str = "tool") -> None:
        self._turns, self._role = turns, role
        self.heard: list[str] = []

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "system", "content": "count"}]

    async def step(self, message: Message) -> Turn:
        type(self).carried_out += 1
        self.heard.append(message["content"])
        n = len(self.heard)
        rewards = {"half": n / 2}
        if n == self._turns:
            assert len(self.heard) == self._turns
            return Turn(reward=1.5, done=True, rewards=rewards, metrics={"heard": n})
        # A list that was a tuple, numbers that are not Python's own: as environments give them.
        content = f"{n}:{message['content']}"
        return Turn(
            messages=[{"role": self._role, "content": content, "more": (1, 2)}], reward=float(np.float32(n) / 4),
            rewards=rewards, metrics={"heard": np.float32(n)}, state=f"s{n}", calls=[("count", 0.5)],
        )  # fmt: skip

    async def close(self) -> None:
        return None


class Replayable(Counter):
    replayable = True


class Snapshots(Counter):
    every = 1

    async def snapshot(self) -> bytes | None:
        return "|".join(self.heard).encode() if len(self.heard) % self.every == 0 else None

    async def restore(self, state: bytes) -> None:
        self.heard = state.decode().split("|") if state else []


class Sparse(Snapshots):
    every = 3
