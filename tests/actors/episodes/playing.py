"""Plays one episode with fakes of environment, engine and renderer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.actors.envs.protocol import Env
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.trajectory import Trajectory
from tests.actors.fakes import STOP, FakeEngine, FakeRenderer, ticket

LIMITS = EpisodeLimits(max_turns=4, max_tokens=200, max_new_tokens=10, call_s=0.5)


def run(env: Env | Callable[[], Env], engine: FakeEngine, limits: EpisodeLimits = LIMITS, **options: Any) -> Trajectory:
    make: Any = env if callable(env) else lambda: env

    async def episode() -> Trajectory:
        progress = Progress(0.0, clock=options.pop("clock", lambda: 0.0))
        begun, renderer = options.pop("ticket", ticket(2, group=5)), options.pop("renderer", FakeRenderer())
        result = await play(begun, make, engine, renderer, limits, progress)
        return result.trajectory(begun, progress, actor="actor-0", env_name="fake")

    return asyncio.run(asyncio.wait_for(episode(), 20))


def saying(*outputs: str) -> FakeEngine:
    """Each output ends with the stop token, unless it ends with `~`: then it is cut."""
    texts = iter(outputs)

    def script(request: str, prompt: Sequence[int], sampling: Any) -> list[int]:
        text = next(texts)
        ids = [ord(c) for c in text.rstrip("~")]
        return ids if text.endswith("~") else [*ids, STOP]

    return FakeEngine(script, LIMITS.max_tokens)
