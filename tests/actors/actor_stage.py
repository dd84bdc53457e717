"""An actor whose engine, environments, buffer, weights and launcher are stand-ins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.actors.ack_log import AckLog
from asyncrl.actors.components import Components
from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.actors.leases import LeaseKeeper, Patience
from asyncrl.actors.loop import Actor
from asyncrl.actors.weight_updates import DrainingEngine, WeightUpdates
from asyncrl.buffer.client import BufferTimeout, TicketReply
from asyncrl.config import Config
from asyncrl.rewards.group_score import GroupAnswer
from asyncrl.tracking.series import check
from asyncrl.trajectory import Lease, LogHead, Ticket, TicketId, Trajectory
from asyncrl.trajectory.turns import Recorded
from asyncrl.user_errors import Cause
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion
from tests.actors.fakes import STOP, FakeEngine, FakeEnv, FakeRenderer, tool_says

DEADLINE_S = 60.0


class FakeBuffer:
    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self.free = list(tickets)
        self.credits: list[int] = []
        self.held: list[tuple[int, int]] = []
        self.stored: list[Trajectory] = []
        self.failed: list[tuple[TicketId, int, str, str]] = []
        self.released: list[Lease] = []
        self.turns: list[tuple[TicketId, int, Recorded]] = []
        self.turn_outcome: Any = "stored"
        self.outcome: Any = "stored"
        self.refuses: Exception | None = None
        """Raised by `fail`."""
        self.silent = 0
        self.hold: tuple[int, int] | None = None
        self.slots: int | None = None
        """Told with every reply (`launch.tuning: auto`)."""

    async def hello(self, role: str) -> dict[str, Any]:
        assert role == "actor"
        return {}

    async def tickets(
        self,
        actor: str,
        held: tuple[int, int],
        credits: int,
        leased: Sequence[Lease],
        wait_s: float,
        logged: LogHead | None = None,
    ) -> TicketReply:
        self.credits.append(credits)
        self.held.append(held)
        lent, self.free = self.free[:credits], self.free[credits:]
        if not lent:
            await asyncio.sleep(wait_s / 10)
        return TicketReply(lent, "" if lent else "nothing to do", self.hold, slots=self.slots)

    async def put(self, trajectory: Trajectory) -> Any:
        if self.silent:
            self.silent -= 1
            raise BufferTimeout("no answer")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.stored.append(trajectory)
        return self.outcome

    async def turn(self, id: TicketId, attempt: int, record: Recorded) -> Any:
        if self.silent:
            self.silent -= 1
            raise BufferTimeout("no answer")
        if isinstance(self.turn_outcome, Exception):
            raise self.turn_outcome
        if self.turn_outcome == "stored":
            self.turns.append((id, attempt, record))
        return self.turn_outcome

    async def fail(self, id: TicketId, attempt: int, reason: str, detail: str, cause: Cause | None = None) -> None:
        self.failed.append((id, attempt, reason, detail))
        if self.refuses is not None:
            raise self.refuses

    async def release(self, actor: str, leases: Sequence[Lease]) -> None:
        self.released += leases


class FakeSubscriber:
    def __init__(self) -> None:
        self.version: tuple[int, int] | None = (0, 0)
        self.corrupt = False
        self.kept: tuple[int, int] | None = None

    def latest(self) -> WeightsVersion | None:
        return None if self.version is None else WeightsVersion(*self.version, "0" * 32)

    def pinned(self) -> WeightsVersion | None:
        return None if self.kept is None else WeightsVersion(*self.kept, "0" * 32)

    def open(self, verify: bool = True, version: tuple[int, int] | None = None) -> Any:
        if self.corrupt:
            raise WeightsCorrupt("cut short")
        found = self.latest() if version is None else WeightsVersion(*version, "0" * 32)

        class FakeWeights:
            id = found

            def close(self) -> None:
                return None

        return FakeWeights()


class FakeReporter:
    def __init__(self) -> None:
        self.causes: list[tuple[str | None, str]] = []
        self.sent: dict[str, float] = {}

    def span(self, name: str, seconds: float, mark: int | None = None, end: float | None = None) -> None:
        """A trace is no part of these tests."""

    def waiting(self, cause: str | None, on: str = "") -> None:
        if not self.causes or self.causes[-1] != (cause, on):
            self.causes.append((cause, on))

    def metrics(self, values: dict[str, float]) -> None:
        check(values)
        self.sent |= values


class Stage:
    """An actor and all that is around it."""

    def __init__(self, tmp_path: Path, tickets: Sequence[Ticket], **options: Any) -> None:
        self.config = Config.model_validate(
            {
                "actors": {
                    "slots": options.get("slots", 4),
                    "drain_s": options.get("drain_s", 0.2),
                    "max_new_tokens": 10,
                }
            }
        )
        self.envs: list[FakeEnv] = []
        self.engine: Any = options.get("engine") or FakeEngine(options.get("script", lambda *_: [65, STOP]))
        self.buffer = FakeBuffer(tickets)
        self.subscriber = FakeSubscriber()
        self.reporter = FakeReporter()
        self.acks = tmp_path / "acks" / "actor-0.jsonl"
        self.stop = asyncio.Event()
        self.revoked: list[Lease] = []
        engine: Any = DrainingEngine(self.engine) if options.get("drain") else self.engine
        self.updates = WeightUpdates(engine, self.subscriber, recompute_kv=True)
        make = options.get("env", lambda: FakeEnv([tool_says("1"), Turn(reward=1.0, done=True)]))

        def make_env() -> FakeEnv:
            self.envs.append(make())
            return self.envs[-1]

        keeper = LeaseKeeper(
            lambda leases: [lease for lease in leases if lease in self.revoked],
            lambda: float(len(self.engine.said)),
            Patience(options.get("idle_s", 10.0), 100.0),
            0.02,
        )
        limits = EpisodeLimits.of(self.config)

        async def play_episode(ticket: Ticket, progress: Progress) -> Trajectory:
            renderer = FakeRenderer()
            result = await play(ticket, make_env, engine, renderer, limits, progress)
            trajectory = result.trajectory(ticket, progress, actor="actor-0", env_name="lookup")
            compared = options.get("compared")  # as group_scores.py does: (ticket, trajectory, answer) -> trajectory
            return await compared(ticket, trajectory, GroupAnswer([], 0.0, {})) if compared else trajectory

        components = Components(
            engine=engine, play=play_episode, buffer=self.buffer, updates=self.updates, keeper=keeper,
            reporter=self.reporter, acks=AckLog(self.acks),  # type: ignore[arg-type]
        )  # fmt: skip
        self.actor = Actor("actor-0", self.config, components)

    def acknowledged(self) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.acks.read_text().splitlines())
        return [line for line in lines if "group" in line]


def act(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario(), DEADLINE_S)

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
