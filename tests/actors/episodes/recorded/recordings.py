"""Episodes with durable turns, of fakes: what they record, and how they go on from it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from asyncrl.actors.engines.protocol import Generation, Sampling
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.trajectory import Ticket, Trajectory
from asyncrl.trajectory.turns import Recorded
from asyncrl.wire.turns import decode_carried, encode_carried
from tests.actors.fakes import STOP, FakeEngine, FakeRenderer, ticket

LIMITS = EpisodeLimits(max_turns=9, max_tokens=600, max_new_tokens=10, call_s=5.0)


class PureEngine(FakeEngine):
    """Its output depends on the prompt alone, whichever engine samples it: three letters and the stop token."""

    def __init__(self) -> None:
        super().__init__(lambda *_: [], 600)

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        begun = next(k for k in range(5) if k == 4 or not 97 <= prompt[-1 - k] <= 99)
        seed = sum(i * id for i, id in enumerate(prompt[: len(prompt) - begun])) % 9973
        rng = np.random.default_rng(seed)
        ids = np.array([*rng.integers(97, 100, 3), STOP], np.int32)
        logprobs = -rng.random(4).astype(np.float32)
        self.calls.append((request, list(prompt), sampling))
        self.said += ids[begun:].tolist()
        await asyncio.sleep(0)
        return Generation(ids[begun:], logprobs[begun:], np.full(4 - begun, self.held_version[1], np.int32), "stop")


@dataclass
class Recorder:
    """What a buffer would have stored of an episode; the record number `revokes`, and those behind it, are revoked."""

    records: list[Recorded] = field(default_factory=list)
    error: Exception | None = None
    after: int = 1 << 30
    room: int = 1 << 30
    """Records that find room."""
    full: int = 0
    """Records that found none."""

    async def keep(self, record: Recorded) -> bool:
        await asyncio.sleep(0)
        if len(self.records) >= self.room:
            self.full += 1
            return False
        if self.error is not None and len(self.records) >= self.after:
            raise self.error
        self.records.append(record)
        return True

    def carried(self, n: int) -> tuple[Recorded, ...]:
        """The first n records, as they come with a ticket."""
        return tuple(decode_carried(encode_carried(record)) for record in self.records[:n])


def counting() -> Callable[[], float]:
    times = itertools.count()
    return lambda: float(next(times))


async def playing(
    make_env: Callable[[], Any], recorder: Recorder | None, carried: Sequence[Recorded] = (), **options: Any
) -> tuple[Trajectory, PureEngine, Progress]:
    engine = options.get("engine") or PureEngine()
    begun: Ticket = replace(ticket(2, group=5), durable=True, turns=tuple(carried))
    progress = options.get("progress") or Progress(0.0, clock=counting())
    progress.keep = None if recorder is None else recorder.keep
    limits = options.get("limits", LIMITS)
    result = await play(begun, make_env, engine, options.get("renderer", FakeRenderer()), limits, progress)
    return result.trajectory(begun, progress, actor="actor-0", env_name="fake"), engine, progress


def played(
    make_env: Callable[[], Any], recorder: Recorder | None, carried: Sequence[Recorded] = (), **options: Any
) -> tuple[Trajectory, PureEngine, Progress]:
    return asyncio.run(asyncio.wait_for(playing(make_env, recorder, carried, **options), 20))
