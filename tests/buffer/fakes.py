"""Stand-ins for the tests of the buffer: a task source, trajectories, an opened buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.attempts import leased as lent_to
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.record import to_record
from asyncrl.buffer.rules import Rules
from asyncrl.config.held_out import HeldOutSet
from asyncrl.data.added_tasks import OnStepEnd
from asyncrl.data.base import Curriculum, GroupResult
from asyncrl.data.demonstrations import Demonstrations, chat
from asyncrl.tracking.rollouts.held_out import Answers
from asyncrl.trajectory import CONTEXT, Row, Ticket, TicketId, Trajectory

RULES: dict[str, Any] = {
    "steps": 100,
    "groups_per_step": 2,
    "group_size": 2,
    "capacity": 64,
    "max_staleness": 1,
    "ranks": 2,
    "slots": 100,
}


class FakeSource:
    def __init__(self, train_size: int | None = None, held_out_size: int = 4) -> None:
        self.train_size = train_size
        self.held_out_size = held_out_size

    def task(self, index: int) -> dict[str, Any]:
        epoch, position = (0, index) if self.train_size is None else divmod(index, self.train_size)
        return {"id": f"task-{position}", "prompt": f"epoch {epoch}"}

    def held_out(self, index: int) -> dict[str, Any]:
        return {"id": f"held-out-{index}", "prompt": "?"}


class FakeChats:
    """So many demonstrations, in memory."""

    def __init__(self, count: int, of: str = "") -> None:
        row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": ""}]}
        self._texts = []
        for n in range(count):
            row["messages"][1]["content"] = f"{of}{n}"
            self._texts.append(chat.encoded(row, "fake"))
        self.digests = [chat.digest(text) for text in self._texts]

    def chat(self, row: int) -> bytes:
        return self._texts[row]

    def where(self, row: int) -> str:
        return f"fake line {row + 1}"


def demonstrations(count: int, of: str = "", seed: int = 0) -> Demonstrations:
    return Demonstrations(FakeChats(count, of), seed)


class FakeCurriculum:
    """Draws from the first `width` tasks; every solved group widens it."""

    def __init__(self) -> None:
        self.width = 1
        self.told: list[tuple[int, list[GroupResult]]] = []

    def draw(self, number: int) -> int:
        return number % self.width

    def update(self, version: int, results: Sequence[GroupResult]) -> None:
        self.told.append((version, list(results)))
        self.width += sum(min(r.rewards) > 0 for r in results)

    def state(self) -> Any:
        return {"width": self.width}

    def restore(self, state: Any) -> None:
        self.width = state["width"]


def rules(*, eval_tasks: int = 0, eval_samples: int = 1, eval_greedy: bool = True, **changes: Any) -> Rules:
    """With `eval_tasks` there is one held-out set."""
    if eval_tasks:
        changes["eval_sets"] = (HeldOutSet("held_out", eval_tasks, eval_samples, eval_greedy, 1.0),)
    return Rules(**(RULES | changes))


def open_buffer(  # noqa: PLR0913 - what a buffer may have
    folder: Path,
    now: float = 0.0,
    source: FakeSource | None = None,
    curriculum: Curriculum | None = None,
    on_step_end: OnStepEnd | None = None,
    wall_clock: Callable[[], float] = time.time,
    held_out: Mapping[str, FakeSource] | None = None,
    demonstrations: Demonstrations | None = None,
    answers: Answers | None = None,
    checkpoints: Path | None = None,
    **changes: Any,
) -> Buffer:
    database = Database(folder, wall_clock=wall_clock)
    given = (curriculum, on_step_end, held_out, answers, demonstrations, checkpoints)
    buffer = Buffer(database, rules(**changes), source or FakeSource(), now, *given)
    buffer.commit(now)
    return buffer


def trajectory(
    ticket: Ticket | TicketId,
    versions: tuple[int, ...] = (0, 0, 0),
    reward: float = 1.0,
    *,
    attempt: int = 0,
    task_id: str = "task-0",
    kind: str = "train",
    stop_reason: str = "done",
    tokens: int = 0,
) -> Trajectory:
    """Two context tokens, then one policy token per entry of `versions` (repeated up to `tokens`)."""
    if isinstance(ticket, Ticket):
        attempt, task_id, kind, ticket = ticket.attempt, str(ticket.task["id"]), ticket.kind, ticket.id
    sampled = np.resize(np.array(versions, np.int32), max(tokens, len(versions)))
    sampled.sort()
    length = 2 + len(sampled)
    mask = np.arange(length) >= 2
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    row = Row(
        np.arange(length, dtype=np.int32),
        mask,
        logprobs,
        np.concatenate([np.full(2, CONTEXT, np.int32), sampled]),
    )
    return Trajectory(
        id=ticket,
        attempt=attempt,
        kind=kind,  # type: ignore[arg-type]
        actor="actor-0",
        task_id=task_id,
        env="fake",
        rows=(row,),
        reward=reward,
        rewards={"success": reward},
        turns=1,
        stop_reason=stop_reason,  # type: ignore[arg-type]
    )


def put(buffer: Buffer, t: Trajectory) -> str:
    """By the actor to whom its attempt was leased."""
    leased = lent_to(buffer.database, t.id, t.attempt)
    lease = buffer.leases.get(t.id.group, t.id.index)
    if leased is None and lease is not None and (lease.id, lease.attempt) == (t.id, t.attempt):
        leased = lease.actor, lease.min_version  # of an evaluation
    t = t if leased is None else replace(t, actor=leased[0])
    return buffer.accept(t, to_record(t))


def learner(buffer: Buffer, version: int = 0, batch: int = 0, publish: bool = True, **options: Any) -> int:
    """A learner starts; gives its incarnation."""
    started = buffer.start(batch, version, options.pop("branch", None), **options)
    if publish and started.published < version:
        buffer.published(started.incarnation, started.branch, version, f"digest-{version}")
    return started.incarnation


def play(
    buffer: Buffer, credits: int = 100, version: int | None = None, now: float = 0.0, reward: float | None = None
) -> list[Ticket]:
    """An actor takes tickets and plays them all with the latest weights; rewards alternate unless given."""
    history = buffer.ledger.history
    held = history.published or 0
    tickets, _ = buffer.issue(now, "actor-0", (history.branch, held), credits)
    for ticket in tickets:
        value = ticket.id.index % 2 if reward is None else reward
        put(buffer, trajectory(ticket, (held if version is None else version,), float(value)))
    return tickets


def step(buffer: Buffer, incarnation: int, b: int, now: float = 0.0) -> tuple[int, ...]:
    """The learner takes batch b, applies it and publishes; gives its groups."""
    answer = buffer.batch(now, incarnation, b)
    assert answer.state == "ready", answer.why
    assert answer.batch is not None
    version = buffer.finished(incarnation, b, "applied")
    buffer.published(incarnation, buffer.ledger.history.branch, version, f"digest-{version}")
    return answer.batch.groups


def equation(buffer: Buffer, branch: int = 0) -> dict[str, int]:
    counts = buffer.ledger.account.equation(branch)
    assert counts["issued"] == sum(n for name, n in counts.items() if name != "issued")
    return counts


def reopen(buffer: Buffer, folder: Path, commit: bool = True, now: float = 0.0, **changes: Any) -> Buffer:
    if commit:
        buffer.commit(now)
    buffer.database.close()
    return open_buffer(folder, now, **changes)
