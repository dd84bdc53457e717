"""The actor's loop against fakes of everything around it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.acks import AckLog
from asyncrl.actors.engines.protocol import EngineDied
from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.episode import Limits, Progress, play
from asyncrl.actors.leases import Lease, LeaseKeeper, Patience
from asyncrl.actors.process import Actor
from asyncrl.actors.updates import DrainingEngine, Updates
from asyncrl.buffer.client import BufferRefused, BufferTimeout, TicketReply
from asyncrl.config import Config
from asyncrl.tracking.series import check
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion
from tests.actors.fakes import STOP, FakeEngine, FakeEnv, FakeRenderer, ticket, tool_says

DEADLINE_S = 20.0


class FakeBuffer:
    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self.free = list(tickets)
        self.credits: list[int] = []
        self.held: list[tuple[int, int]] = []
        self.stored: list[Trajectory] = []
        self.failed: list[tuple[TicketId, int, str, str]] = []
        self.released: list[Lease] = []
        self.outcome: Any = "stored"
        self.silent = 0

    async def hello(self, role: str) -> dict[str, Any]:
        assert role == "actor"
        return {}

    async def tickets(
        self, actor: str, held: tuple[int, int], credits: int, leased: Sequence[Lease], wait_s: float
    ) -> TicketReply:
        self.credits.append(credits)
        self.held.append(held)
        lent, self.free = self.free[:credits], self.free[credits:]
        if not lent:
            await asyncio.sleep(wait_s / 10)
        return TicketReply(lent, "" if lent else "nothing to do")

    async def put(self, trajectory: Trajectory) -> Any:
        if self.silent:
            self.silent -= 1
            raise BufferTimeout("no answer")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.stored.append(trajectory)
        return self.outcome

    async def fail(self, id: TicketId, attempt: int, reason: str, detail: str) -> None:
        self.failed.append((id, attempt, reason, detail))

    async def release(self, actor: str, leases: Sequence[Lease]) -> None:
        self.released += leases


class FakeSubscriber:
    def __init__(self) -> None:
        self.version: tuple[int, int] | None = (0, 0)
        self.corrupt = False

    def latest(self) -> WeightsVersion | None:
        return None if self.version is None else WeightsVersion(*self.version, "0" * 32)

    def open(self, verify: bool = True) -> Any:
        if self.corrupt:
            raise WeightsCorrupt("cut short")
        version = self.latest()

        class FakeWeights:
            id = version

            def close(self) -> None:
                return None

        return FakeWeights()


class FakeReporter:
    def __init__(self) -> None:
        self.causes: list[tuple[str | None, str]] = []
        self.sent: dict[str, float] = {}

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
            {"actors": {"slots": options.get("slots", 4), "drain_s": options.get("drain_s", 0.2), "max_new_tokens": 10}}
        )
        self.envs: list[FakeEnv] = []
        self.engine = FakeEngine(options.get("script", lambda *_: [65, STOP]))
        self.buffer = FakeBuffer(tickets)
        self.subscriber = FakeSubscriber()
        self.reporter = FakeReporter()
        self.acks = tmp_path / "acks" / "actor-0.jsonl"
        self.stop = asyncio.Event()
        self.revoked: list[Lease] = []
        engine: Any = DrainingEngine(self.engine) if options.get("drain") else self.engine
        self.updates = Updates(engine, self.subscriber, recompute_kv=True)
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
        limits = Limits.of(self.config)

        async def play_episode(ticket: Ticket, progress: Progress) -> Trajectory:
            renderer = FakeRenderer()
            return await play(ticket, make_env, engine, renderer, limits, progress, actor="actor-0", env_name="lookup")

        self.actor = Actor(
            "actor-0", self.config, engine=engine, play=play_episode, buffer=self.buffer,
            updates=self.updates, keeper=keeper, reporter=self.reporter, acks=AckLog(self.acks),  # type: ignore[arg-type]
        )  # fmt: skip

    def acknowledged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.acks.read_text().splitlines()]


def act(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario(), DEADLINE_S)

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_tickets_become_acknowledged_trajectories(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(i, group=g) for g in range(3) for i in range(4)])
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.counts.episodes == 12)
        s.stop.set()
        await running
        assert {t.id for t in s.buffer.stored} == {TicketId(0, g, i) for g in range(3) for i in range(4)}
        assert [(a["group"], a["index"], a["digest"]) for a in s.acknowledged()] == [
            (t.id.group, t.id.index, t.digest()) for t in s.buffer.stored
        ]
        assert s.buffer.credits[0] == 4
        assert max(s.buffer.credits) == 4
        assert all(env.closed == 1 for env in s.envs)
        assert s.reporter.sent["throughput/episodes"] == 12
        assert s.reporter.sent["throughput/tokens_generated"] == 48
        assert s.reporter.sent["throughput/slots_busy"] == 0
        assert ("ticket", "buffer: nothing to do") in s.reporter.causes
        assert s.buffer.released == []

    act(scenario)


def test_an_actor_that_plays_more_than_it_has_slots_by_now_asks_for_nothing(tmp_path: Path) -> None:
    """The engine took KV cache away: there are fewer slots than episodes for a while."""

    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(i) for i in range(4)])
        s.engine.gate = asyncio.Event()
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.actor._playing) == 4)
        s.actor._slots.now = 2
        s.actor._changed.set()
        await asyncio.sleep(0.05)
        s.engine.gate.set()
        await until(lambda: s.actor.counts.episodes == 4)
        s.stop.set()
        await running
        assert min(s.buffer.credits) >= 1

    act(scenario)


def test_nothing_is_asked_before_weights_are_held(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()])
        s.subscriber.version = None
        running = asyncio.create_task(s.actor.run(s.stop))
        await asyncio.sleep(0.1)
        assert s.buffer.credits == []
        assert s.reporter.causes[-1] == ("weights", "learner")
        s.subscriber.version = (1, 5)
        await until(lambda: s.actor.counts.episodes == 1)
        s.stop.set()
        await running
        assert set(s.buffer.held) == {(1, 5)}
        assert s.buffer.stored[0].newest_version == 5

    act(scenario)


def test_a_put_is_sent_again_until_it_is_acknowledged(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()])
        s.buffer.silent = 2
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.counts.episodes == 1)
        s.stop.set()
        await running
        assert len(s.buffer.stored) == len(s.acknowledged()) == 1
        assert ("buffer", "buffer") in s.reporter.causes

    act(scenario)


@pytest.mark.parametrize(("outcome", "lines"), [("stored", 1), ("duplicate", 1), ("late", 0)])
def test_only_what_is_stored_is_logged(tmp_path: Path, outcome: str, lines: int) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(), ticket(1, kind="eval")])
        s.buffer.outcome = outcome
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.counts.episodes == 2)
        s.stop.set()
        await running
        assert len(s.acknowledged()) == lines

    act(scenario)


def test_a_failing_environment_costs_its_episode_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        def env() -> FakeEnv:
            return FakeEnv([ValueError("boom")] if len(s.envs) == 0 else [Turn(done=True)])

        s = Stage(tmp_path, [ticket(0), ticket(1)], env=env)
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.counts.episodes == 1 and len(s.buffer.failed) == 1)
        s.stop.set()
        await running
        ((id, attempt, reason, detail),) = s.buffer.failed
        assert (id, attempt, reason) == (TicketId(0, 0, 0), 1, "env_error")
        assert "boom" in detail
        assert s.reporter.sent["throughput/tokens_wasted/aborted"] == 2

    act(scenario)


@pytest.mark.parametrize(("code", "failures"), [("bad_trajectory", 1), ("unknown_ticket", 0)])
def test_a_refused_trajectory_is_no_reason_to_end(tmp_path: Path, code: str, failures: int) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()])
        s.buffer.outcome = BufferRefused("put", code, "no")
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: s.actor.counts.aborted_tokens == 4)
        s.stop.set()
        await running
        assert [reason for _, _, reason, _ in s.buffer.failed] == ["env_error"] * failures
        assert s.acknowledged() == []

    act(scenario)


class Waits(FakeEnv):
    async def step(self, message: Any) -> Turn:
        await asyncio.sleep(60)
        return Turn(done=True)


def test_an_episode_without_progress_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()], env=lambda: Waits([]), idle_s=0.1)
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.buffer.failed))
        s.stop.set()
        await running
        assert s.buffer.failed[0][2] == "timeout"
        assert "episode_idle_s" in s.buffer.failed[0][3]
        assert ("environment", "lookup") in s.reporter.causes
        assert s.envs[0].closed == 1

    act(scenario)


def test_a_revoked_lease_ends_the_episode_silently(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(0), ticket(1)], env=lambda: Waits([]))
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: sum(bool(e.heard) or e.task != {} for e in s.envs) == 2)
        s.revoked.append((TicketId(0, 0, 0), 1))
        await until(lambda: s.envs[0].closed == 1)
        assert s.envs[1].closed == 0
        s.stop.set()
        await running
        assert s.buffer.failed == []
        assert s.buffer.released == [(TicketId(0, 0, 1), 1)]

    act(scenario)


def test_new_weights_are_taken_between_tokens_and_told_to_the_buffer(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [])
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.buffer.held))
        s.subscriber.version = (0, 1)
        await until(lambda: s.buffer.held[-1] == (0, 1))
        s.subscriber.corrupt, s.subscriber.version = True, (0, 2)
        await asyncio.sleep(0.1)
        assert s.buffer.held[-1] == (0, 1)
        s.subscriber.corrupt = False
        await until(lambda: s.buffer.held[-1] == (0, 2))
        s.subscriber.version = (1, 0)  # a later branch starts at a lower version
        await until(lambda: s.buffer.held[-1] == (1, 0))
        s.subscriber.version = (0, 9)
        await asyncio.sleep(0.1)
        assert s.buffer.held[-1] == (1, 0)
        s.stop.set()
        await running
        assert s.engine.log[:3] == ["pause True", "load (0, 0)", "resume"]
        assert s.reporter.sent["weights/updates"] == 4

    act(scenario)


def test_an_evaluation_keeps_its_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket(kind="eval")])
        s.engine.gate = asyncio.Event()
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.calls))
        s.subscriber.version = (0, 1)
        await asyncio.sleep(0.1)
        assert s.engine.held == (0, 0)
        s.engine.gate.set()
        await until(lambda: s.engine.held == (0, 1))
        assert [t.newest_version for t in s.buffer.stored] == [0]
        s.stop.set()
        await running

    act(scenario)


def test_under_drain_running_requests_finish_before_an_update(tmp_path: Path) -> None:
    async def scenario() -> None:
        s = Stage(tmp_path, [ticket()], drain=True)
        s.engine.gate = asyncio.Event()
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: bool(s.engine.calls))
        s.subscriber.version = (0, 1)
        await until(lambda: s.updates.loading)
        await asyncio.sleep(0.05)
        assert s.engine.held == (0, 0)
        s.engine.gate.set()
        await until(lambda: s.actor.counts.episodes == 1)
        s.stop.set()
        await running
        row = s.buffer.stored[0].rows[0]
        assert row.versions[row.mask].tolist() == [0, 0, 1, 1]

    act(scenario)


def test_told_to_stop_it_drains_then_gives_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        class Slow(FakeEnv):
            async def step(self, message: Any) -> Turn:
                await asyncio.sleep(0.15 if self.task["episode"] == 0 else 60)
                return Turn(done=True)

        s = Stage(tmp_path, [ticket(0), ticket(1)], env=lambda: Slow([]), drain_s=0.5)
        running = asyncio.create_task(s.actor.run(s.stop))
        await until(lambda: len(s.engine.said) == 4)
        s.buffer.free.append(ticket(2))
        s.buffer.free.append(ticket(3))
        s.buffer.free.append(ticket(4))
        s.stop.set()
        await running
        assert [t.id.index for t in s.buffer.stored] == [0]
        released = {lease[0].index for lease in s.buffer.released}
        assert 1 in released
        lent = {2, 3, 4} - {t.id.index for t in s.buffer.free}
        assert released == {1} | lent, "a ticket that arrived while stopping is given back, too"
        assert all(env.closed == 1 for env in s.envs)

    act(scenario)


def test_a_dead_engine_ends_the_actor(tmp_path: Path) -> None:
    async def scenario() -> None:
        def dies(*_: Any) -> list[int]:
            raise EngineDied("out of memory")

        s = Stage(tmp_path, [ticket()], script=dies)
        with pytest.raises(EngineDied, match="out of memory"):
            await s.actor.run(s.stop)
        assert s.buffer.failed == []

    act(scenario)
