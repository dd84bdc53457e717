"""A deterministic recording: a run whose actors and learner are played by hand, in a loop of its own, on the buffer.

It uses nothing of asyncrl/plan: every 'process' has a time at which it acts next, the earliest one acts, and the ledger
gets the virtual times. What lasts how long is drawn from a seed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.client import BufferRefused
from asyncrl.buffer.in_process import InProcessBuffer, VirtualClock
from asyncrl.buffer.rules import Rules
from asyncrl.trajectory import CONTEXT, Row, Ticket, Trajectory, TurnRecord
from tests.buffer.fakes import FakeSource

RENEW_S = 10.0
RETRY_S = 0.05
"""How often a request for a batch that is held is tried again."""


@dataclass
class FakeActor:
    name: str
    held: int = 0
    playing: dict[tuple[int, int, int], tuple[Ticket, float]] = field(default_factory=dict)
    """By group, index and attempt: the ticket, and when its episode ends."""
    loads: list[tuple[float, int]] = field(default_factory=list)
    measures: bool = True
    """Its engine records the times of turns."""


def record(
    folder: Path,
    rules: Rules,
    *,
    actors: int,
    slots: int,
    steps: int,
    seed: int,
    every: int = 1,
    measures: bool = True,
) -> LedgerRows:
    """Records `steps` batches into `folder`/buffer, and the loads into `folder`/spans.jsonl."""
    rng, clock, spans = Random(seed), VirtualClock(), []
    with InProcessBuffer(rules, FakeSource(), folder=folder / "buffer", clock=clock) as buffer:
        crew = [FakeActor(f"actor-{n}", measures=measures) for n in range(actors)]
        learner = buffer.start(0, 0, None).incarnation
        buffer.published(learner, 0, 0, "0")
        published, batch, finishing, publishing, retry = 0, 0, None, None, None
        line: list[FakeActor] = []
        renews = {a.name: RENEW_S * (1 + (n + 1) % 7 / 7) for n, a in enumerate(crew)}
        while batch < steps:
            if finishing is None and publishing is None:
                reply = buffer.batch(learner, batch, 0, 1, 0.0)
                if reply.state == "ready":
                    finishing = clock.now + rng.uniform(0.5, 1.5)
                elif rules.over_age == "wait" and (retry is None or retry <= clock.now):
                    retry = clock.now + RETRY_S
            _issue(buffer, crew, line, published, slots, clock, rng)
            times = [end for a in crew for _, end in a.playing.values()] + [at for a in crew for at, _ in a.loads]
            times += [t for t in (finishing, publishing, retry) if t is not None and t > clock.now]
            clock.now = min([*times, *renews.values()])
            if finishing == clock.now:
                version = buffer.finished(learner, batch, "applied")
                batch, finishing = batch + 1, None
                publishing = clock.now + rng.uniform(0.01, 0.1) if version % every == 0 else None
            elif publishing == clock.now:
                published = batch
                buffer.published(learner, 0, published, str(published))
                publishing = None
                for a in crew:
                    a.loads.append((clock.now + rng.uniform(0.01, 0.2), published))
            for a in crew:
                _act(buffer, a, clock.now, rng, spans)
                if renews[a.name] == clock.now:
                    renews[a.name] += RENEW_S
                    for id, attempt in buffer.renew(a.name, [(t.id, t.attempt) for t, _ in a.playing.values()]):
                        del a.playing[id.group, id.index, attempt]
        buffer.core.commit(clock.now)
    lines = (json.dumps({"role": role, "spans": [span]}) for role, span in spans)
    (folder / "spans.jsonl").write_text("".join(line + "\n" for line in lines))
    return read_ledger(folder / "buffer")


def _issue(
    buffer: InProcessBuffer,
    crew: list[FakeActor],
    line: list[FakeActor],
    published: int,
    slots: int,
    clock: VirtualClock,
    rng: Random,
) -> None:
    """Answers the actors with free slots in the order in which they asked, until one gets nothing."""
    line += [a for a in crew if a not in line and len(a.playing) < slots]
    for a in list(line):
        if a.held < published:
            continue
        line.remove(a)
        tickets = buffer.tickets(a.name, (0, a.held), slots - len(a.playing), [], 0.0).tickets
        for ticket in tickets:
            a.playing[ticket.id.group, ticket.id.index, ticket.attempt] = ticket, clock.now + rng.lognormvariate(0, 0.8)
        if not tickets:
            line.insert(0, a)
            return
        if len(a.playing) < slots:
            line.append(a)


def _act(buffer: InProcessBuffer, a: FakeActor, now: float, rng: Random, spans: list[Any]) -> None:
    """What the actor does at this time: loads, or puts what is over."""
    for at, version in list(a.loads):
        if at == now:
            a.loads.remove((at, version))
            a.held = max(a.held, version)
            spans.append((a.name, ["load", now, 0.01, version]))
    for key, (ticket, end) in list(a.playing.items()):
        if end == now:
            del a.playing[key]
            try:
                buffer.put(_trajectory(ticket, a, rng))
            except BufferRefused as refused:
                raise AssertionError(f"{ticket.id}: {refused}") from refused


def _trajectory(ticket: Ticket, actor: FakeActor, rng: Random) -> Trajectory:
    oldest = max(ticket.min_version[1], 0)
    sampled = np.sort(np.array([rng.randint(oldest, actor.held) for _ in range(rng.randint(3, 30))], np.int32))
    versions = np.concatenate([np.full(4, CONTEXT, np.int32), sampled])
    zeros = np.zeros(len(versions), np.int32)
    row = Row(zeros, versions != CONTEXT, zeros.astype(np.float32), versions)
    return Trajectory(
        id=ticket.id, attempt=ticket.attempt, kind="train", actor=actor.name, task_id=str(ticket.task["id"]),
        env="fake", rows=(row,), reward=float(rng.random() < 0.5), rewards={}, turns=1, stop_reason="done",
        turn_records=(TurnRecord(None, 0.01 * len(sampled), 0.05, 4, len(sampled)),) if actor.measures else (),
    )  # fmt: skip
