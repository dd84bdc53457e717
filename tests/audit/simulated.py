"""Small histories of the real buffer, in this process, with what its actors and its learner would have written down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.actors.ack_log import AckLog
from asyncrl.audit.actor_logs import read_logs
from asyncrl.audit.chain import read_head
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.scorer_logs import read_score_logs
from asyncrl.audit.witnesses import Bounds, Evidence, LearnerList, Publication, SnapshotHead
from asyncrl.buffer.client.messages import GroupLease, Told
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.tasks.added_tasks import task_of as added_task
from asyncrl.data.added_tasks import ADDED
from asyncrl.learner.checkpoints.checkpoints import Done, group_digests
from asyncrl.scorer.score_log import ScoreLog
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from asyncrl.trajectory.turns import Recorded
from asyncrl.wire.teacher_scores import from_record as scores_from_record
from tests.buffer.fakes import (
    RULES,
    FakeCurriculum,
    FakeSource,
    demonstrations,
    learner,
    open_buffer,
    put,
    rules,
    trajectory,
)
from tests.buffer.scoring.fakes import bring as put_scores
from tests.buffer.scoring.fakes import lease, scores
from tests.buffer.tickets.test_turns import record, sample


class Simulated:
    """A buffer, one actor and one learner, and their own records."""

    def __init__(self, folder: Path, on_step_end: Any = None, **rules: Any) -> None:
        self.folder, self.rules, self.on_step_end = folder, rules, on_step_end
        self.shown = demonstrations(7) if "demonstrations_per_step" in rules else None
        self.scored: dict[str, ScoreLog] = {}
        self.log = AckLog(folder / "acks" / "actor-0.jsonl")
        self.done: list[Done] = []
        self.lists: list[LearnerList] = []
        self.snapshots: list[SnapshotHead] = []
        self.now = self.ahead = 0.0
        """The buffer's clocks; of the second, how far it is ahead of the real one."""
        self.told: Told | None = None
        self.buffer = self.open()
        self.incarnation = learner(self.buffer)
        self.published = [Publication(0, 0, "digest-0")]

    def open(self) -> Buffer:
        given: dict[str, Any] = {"demonstrations": self.shown, "wall_clock": self.clock, "checkpoints": self.folder}
        given |= self.rules
        return open_buffer(self.folder, self.now, FakeSource(), FakeCurriculum(), self.on_step_end, **given)

    def clock(self) -> float:
        return time.time() + self.ahead

    def kill(self) -> None:
        self.buffer.commit(self.now)
        self.buffer.database.close()
        self.buffer = self.open()

    def issue(self, credits: int) -> list[Ticket]:
        history = self.buffer.ledger.history
        return self.buffer.issue(self.now, "actor-0", (history.branch, history.published or 0), credits)[0]

    def put(self, ticket: Ticket, reward: float | None = None) -> None:
        versions = (ticket.min_version[1], self.buffer.ledger.history.published or 0)
        made = trajectory(ticket, versions, float(ticket.id.index) if reward is None else reward)
        made = self.log.announce(made)
        if put(self.buffer, made) != "late" and ticket.kind == "train":
            self.log.write(made)
            self.buffer.logged("actor-0", self.log.head)

    def put_made(self, made: Trajectory) -> None:
        made = self.log.announce(made)
        if put(self.buffer, made) != "late":
            self.log.write(made)
            self.buffer.logged("actor-0", self.log.head)

    def record(self, ticket: Ticket, records: Sequence[Recorded]) -> None:
        for each, said in zip(records, record(self.buffer, ticket, records), strict=True):
            if said == "stored":
                self.log.recorded((ticket.id, ticket.attempt), each)
        self.buffer.logged("actor-0", self.log.head)

    def hand_over(self, ticket: Ticket) -> None:
        """The actor leaves amid the first turn."""
        self.record(ticket, [sample(0, self.buffer.ledger.history.published or 0, stop_reason="abort")])
        self.buffer.release("actor-0", [(ticket.id, ticket.attempt)])

    def step(self, outcome: Any = "applied") -> None:
        b = len(self.done)
        answer = self.buffer.batch(self.now, self.incarnation, b)
        assert answer.batch is not None, answer.why
        groups = self.buffer.share(answer, 0, 1)
        members = [n for n in answer.batch.groups for _ in range(2)]
        taught = [scores_from_record(record) for record, _ in self.buffer.scores(answer, 0, 1)]
        members += [each.group for each in taught]
        digests = group_digests(members, (*(d for _, d, _ in groups), *(each.digest() for each in taught)))
        version = self.buffer.finished(self.incarnation, b, outcome, self.told, self.now)
        self.publish(version, f"digest-{version}")
        shown = [each.digest for each in self.buffer.demonstrations.of(answer.batch)]
        teacher = taught[0].teacher if taught else ""
        self.done.append(Done(b, outcome, digests, teacher=teacher, demonstrations=shown))

    def publish(self, version: int, digest: str) -> None:
        branch = self.buffer.ledger.history.branch
        self.buffer.published(self.incarnation, branch, version, digest)
        if (branch, version) not in [(p.branch, p.version) for p in self.published]:
            self.published.append(Publication(branch, version, digest))

    def score(self, credits: int = 99, scorer: str = "scorer-0", *, bring: bool = True) -> list[GroupLease]:
        """A scorer takes groups, and brings their scores."""
        given = lease(self.buffer, credits, self.now, scorer)
        log = self.scored.setdefault(scorer, ScoreLog(self.folder / "scores" / f"{scorer}.jsonl"))
        for each in given if bring else ():
            made = log.announced(scores(self.buffer, each, scorer))
            if put_scores(self.buffer, made) == "stored":
                log.write(made)
            head = log.head
            assert head is not None
            self.buffer.scoring.logged(scorer, head)
        return given

    def rounds(self, count: int) -> None:
        for _ in range(count):
            for ticket in self.issue(6):
                self.put(ticket)
            self.step()

    def fork(self, b: int, version: int, weights: str = "other") -> None:
        self.incarnation = learner(self.buffer, version, b, branch=0, fresh=True, publish=False)
        self.publish(version, f"{weights}-{version}")
        del self.done[b:]

    def checkpoint(self) -> None:
        history = self.buffer.ledger.history
        path = self.folder / f"step-{history.version:06d}"
        path.mkdir(exist_ok=True)
        self.buffer.checkpointed(self.now, self.incarnation, history.version, len(self.done), path)
        self.lists.append(LearnerList(path.name, history.branch, len(self.done), [*self.done]))
        head = read_head(path / "buffer" / "ledger.sqlite")
        self.snapshots.append(SnapshotHead(path.name, history.branch, len(self.done), *head))

    def evaluate(self) -> None:
        history = self.buffer.ledger.history
        self.buffer.evaluate((history.branch, history.published or 0))
        for ticket in self.issue(8):
            self.put(ticket, 0.5)

    def trained(self, steps: int) -> None:
        """Steps by another actor, while the first one is reserved."""
        other = AckLog(self.folder / "acks" / "actor-1.jsonl")
        for _ in range(steps):
            history = self.buffer.ledger.history
            held = history.branch, history.published or 0
            for ticket in self.buffer.issue(self.now, "actor-1", held, 6)[0]:
                made = trajectory(ticket, (ticket.min_version[1],), float(ticket.id.index))
                made = other.announce(replace(made, actor="actor-1"))
                if put(self.buffer, made) == "stored":
                    other.write(made)
                    self.buffer.logged("actor-1", other.head)
            self.step()

    def evaluated(self, pinned: int, tickets: int = 99, success: Sequence[float] = ()) -> list[Ticket]:
        """The reserved actor plays so many tickets with the pinned version; `success`: their rewards."""
        issued = self.buffer.issue(self.now, "actor-0", (self.buffer.ledger.history.branch, pinned), tickets)[0]
        for place, ticket in enumerate(issued):
            reward = success[place] if success else float(ticket.id.index) / 2
            made = self.log.announce(trajectory(ticket, (pinned,), reward))
            assert put(self.buffer, made) == "stored"
        return issued

    def failing(self, pinned: int) -> tuple[TicketId, int]:
        """One more of its tickets, for an episode that fails."""
        (ticket,) = self.buffer.issue(self.now, "actor-0", (0, pinned), 1)[0]
        return ticket.id, ticket.attempt

    def evidence(self) -> Evidence:
        """Closes the buffer."""
        self.buffer.commit(self.now)
        self.buffer.database.close()
        r: dict[str, Any] = {"max_uses": 1, "over_age": "drop", "mask_min_kept": 0.5} | RULES | self.rules
        r["eval_sets"] = rules(**self.rules).eval_sets
        taken = (
            "filters", "filter_max_ratio", "env_retries", "requeue", "eval_sets", "eval_every", "choosing", "replay",
            "demonstrations_per_step", "auto", "tuning", "scored", "durable", "turns_auto_s",
        )  # fmt: skip
        bounds = Bounds(
            r["groups_per_step"], r["max_uses"], r["max_staleness"], r["over_age"], r["mask_min_kept"],
            **{name: r[name] for name in taken if name in r},
        )  # fmt: skip
        ledger = read_ledger(self.folder)

        def task(index: int) -> tuple[str, int]:
            row = ledger.added.get(index)
            task = FakeSource().task(index) if row is None else added_task(index, row.task)
            return str(task["id"]), RULES["group_size"]

        assert ADDED not in ledger.added or self.on_step_end
        return Evidence(
            ledger,
            [*read_logs(self.folder / "acks").values()],
            self.lists,
            task,
            FakeCurriculum(),
            PayloadFiles(self.folder / "payloads").read,
            bounds,
            (bounds,),
            tuple(self.published),
            snapshots=tuple(self.snapshots),
            scorers=read_score_logs(self.folder / "scores"),
            demonstrations=self.shown,
            held_out={each.name: FakeSource().held_out_size for each in rules(**self.rules).eval_sets},
        )
