"""Small histories of the real buffer, in this process, with what its actors and its learner would have written down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.actors.ack_log import AckLog
from asyncrl.audit.actor_logs import read_logs
from asyncrl.audit.chain import read_head
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.scorer_logs import read_score_logs
from asyncrl.audit.witnesses import Bounds, Evidence, LearnerList, Publication, SnapshotHead
from asyncrl.buffer.bounds.automatic import Auto
from asyncrl.buffer.bounds.slots import SlotLimits
from asyncrl.buffer.client.messages import GroupLease, Told
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.replaying import PRIORITIES, Replaying
from asyncrl.buffer.selection import zero_variance
from asyncrl.buffer.tasks.added_tasks import task_of as added_task
from asyncrl.config.choosing import Choosing
from asyncrl.config.held_out import HeldOutSet
from asyncrl.data.added_tasks import ADDED
from asyncrl.data.base import GroupResult
from asyncrl.learner.checkpoints.checkpoints import Done, group_digests
from asyncrl.scorer.score_log import ScoreLog
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from asyncrl.trajectory.turns import Recorded, RecordedSample
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
from tests.buffer.scoring.fakes import SCORED, lease, scores
from tests.buffer.scoring.fakes import bring as put_scores
from tests.buffer.tickets.test_turns import RESET, answer, episode, played, record, sample


def more(version: int, results: Sequence[GroupResult], tasks: Sequence[Any]) -> list[str]:
    """One more task after the first step."""
    return [json.dumps({"prompt": f"again, after {version}"})] if version == 1 else []


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


def interrupted(folder: Path) -> Simulated:
    """The buffer was opened again, attempts failed or were released, a filter dropped groups, a step was refused."""
    run = Simulated(folder, more, filters=(zero_variance,), filter_max_ratio=1.0, env_retries=0, eval_tasks=2)
    first = run.issue(8)
    run.put(first[0])
    run.put(first[0])
    run.buffer.release("actor-0", [(first[1].id, first[1].attempt)])
    run.buffer.fail("actor-0", first[2].id, first[2].attempt, "env_error", "away")
    for ticket in first[4:]:
        run.put(ticket, 1.0 if ticket.id.group == 2 else None)
    run.put(first[4])
    run.kill()
    for ticket in run.issue(5):
        run.put(ticket)
    run.put(first[2])
    run.step()
    run.checkpoint()
    run.rounds(1)
    run.evaluate()
    for ticket in run.issue(8):
        run.put(ticket)
    run.step("guard")
    run.kill()
    run.incarnation = learner(run.buffer, 2, 3, branch=0)
    run.rounds(1)
    run.checkpoint()
    run.issue(1)
    return run


def forked(folder: Path) -> Simulated:
    """A new branch began at batch 1."""
    run = Simulated(folder)
    run.rounds(1)
    run.checkpoint()
    run.rounds(2)
    for ticket in run.issue(5)[:4]:
        run.put(ticket)
    run.fork(1, 1)
    run.rounds(3)
    run.checkpoint()
    return run


def awaited(folder: Path) -> Simulated:
    """The learner waited for groups, for one of them in vain."""
    run = Simulated(folder, over_age="wait", wait_s=5.0, max_staleness=0)
    tickets = run.issue(4)
    for ticket in tickets[:3]:
        run.put(ticket)
    for run.now in (0.0, 10.0):
        assert run.buffer.batch(run.now, run.incarnation, 0).state == "waiting"
    for ticket in run.issue(2):
        run.put(ticket)
    run.step()
    run.rounds(2)
    run.checkpoint()
    return run


def used_twice(folder: Path) -> Simulated:
    run = Simulated(folder, max_uses=2)
    for ticket in run.issue(6):
        run.put(ticket)
    run.step()
    run.step()
    run.rounds(3)
    run.put(run.issue(2)[0])
    run.checkpoint()
    return run


def replayed(folder: Path) -> Simulated:
    """Used groups were drawn by unequal priorities; some yielded, some became too old; a step was refused, and the
    last batches were left for a branch."""
    replay = Replaying(2, PRIORITIES["spread"], exponent=0.7, beta=0.5, half_life=2.0)
    run = Simulated(folder, replay=replay, max_uses=4, max_staleness=3, capacity=16)

    def rounds(count: int) -> None:
        for _ in range(count):
            for ticket in run.issue(6):
                run.put(ticket, float(ticket.id.index * (1 + ticket.id.group % 4)))
            run.step()

    rounds(4)
    run.step("guard")
    rounds(1)
    run.kill()
    run.checkpoint()
    rounds(3)
    run.fork(6, 5)
    rounds(2)
    run.checkpoint()
    return run


def evaluated(folder: Path) -> Simulated:
    """Two sets are due at every step: played, skipped while they were open, begun again, and open at the end."""
    sets = (HeldOutSet("easy", 2, 1, False, 1.0), HeldOutSet("hard", 1, 2, True, 0.5, pass_at=(2,)))
    run = Simulated(folder, eval_sets=sets, eval_every=1, eval_reserved=1, env_retries=0)
    run.trained(1)
    assert [t.eval_set for t in run.evaluated(1)] == ["easy"] * 2 + ["hard"] * 3
    run.trained(2)
    run.evaluated(2, tickets=2)
    run.buffer.evaluation(lost=(0, 2))
    run.kill()
    run.evaluated(3, tickets=2)
    run.buffer.fail("actor-0", *run.failing(3), "env_error", "away")
    run.checkpoint()
    run.trained(1)
    run.evaluated(4, tickets=3)
    return run


def shown(folder: Path) -> Simulated:
    """Demonstrations beside groups: a step was refused, the buffer was opened again, and a branch began."""
    run = Simulated(folder, demonstrations_per_step=3)
    run.rounds(1)
    for ticket in run.issue(6):
        run.put(ticket)
    run.step("guard")
    run.checkpoint()
    run.kill()
    run.incarnation = learner(run.buffer, 1, 2, branch=0)
    run.rounds(2)
    run.checkpoint()
    run.fork(3, 2)
    run.rounds(2)
    run.checkpoint()
    return run


def supervised(folder: Path) -> Simulated:
    """Demonstrations alone, one in a batch."""
    run = Simulated(folder, demonstrations_per_step=1, groups_per_step=0)
    run.step()
    run.step("guard")
    run.checkpoint()
    run.step()
    run.kill()
    run.checkpoint()
    run.fork(2, 1)
    run.step()
    run.step()
    run.checkpoint()
    return run


def stopped(folder: Path) -> Simulated:
    """A result stopped the run, a branch went on, and another result stopped that one."""
    dev = ("dev", "sampled")
    sets = (HeldOutSet("dev", 2, 1, False, 1.0),)
    choosing = Choosing(stop_at=((dev, 1.0),), patience=((dev, 1),))
    run = Simulated(folder, eval_sets=sets, eval_every=1, eval_reserved=1, choosing=choosing)
    run.trained(1)
    run.evaluated(1, success=(1.0, 0.0))
    run.trained(1)
    run.checkpoint()
    run.evaluated(2, success=(1.0, 1.0))
    assert run.buffer.batch(run.now, run.incarnation, 2).state == "ended"
    run.kill()
    run.fork(2, 2)
    run.trained(1)
    run.evaluated(2, success=(0.0, 0.0))
    assert run.buffer.batch(run.now, run.incarnation, 3).state == "ended"
    return run


def recorded(folder: Path) -> Simulated:
    """Turns were recorded: continued by a later attempt, interrupted in a sample, ended in every other way."""
    run = Simulated(folder, durable=True, env_retries=9)
    first = run.issue(6)
    for ticket in first[:4]:
        run.record(ticket, [*episode(2), sample(2, stop_reason="abort")])
        run.buffer.release("actor-0", [(ticket.id, ticket.attempt)])
    for ticket in first[4:]:
        run.record(ticket, episode(1))
    run.kill()
    again = run.issue(4)
    for ticket, samples in zip(again, ([0, 1, 2], [0, 1, 2], [0, 1], [5]), strict=True):
        if ticket.id.index == 1:
            run.record(ticket, [sample(2, tokens=4 if ticket.id.group else 5)])
        run.put_made(played(ticket, [sample(n, tokens=4 if n == 2 else 3) for n in samples]))
    run.step()
    run.checkpoint()
    run.buffer.fail("actor-0", first[4].id, 0, "env_error", "away")
    run.buffer.fail("actor-0", first[5].id, 0, "env_diverged", "another answer")
    for ticket in run.issue(8):
        if ticket.id.group > 2:
            run.record(ticket, [RESET, sample(0, 1), answer(0)])
            run.buffer.release("actor-0", [(ticket.id, ticket.attempt)])
        else:
            run.put(ticket)
    for ticket in run.issue(2):
        run.record(ticket, [RESET, sample(0, 1, tokens=2)])
        run.put_made(played(ticket, [sample(0, 1, tokens=2)]))
    run.step()
    for ticket in run.issue(8):
        if ticket.id.group % 2:
            run.put(ticket)
    run.step()
    for ticket in run.issue(3):
        run.record(ticket, [RESET, sample(0, run.buffer.ledger.history.version)])
    return run


def branched(folder: Path) -> Simulated:
    """A branch began while groups were in flight: they went on with a stored trajectory and turns, of which
    some were too late; one had a trajectory that was too late."""
    run = Simulated(folder, durable=True, max_staleness=3)
    first = run.issue(8)
    for ticket in first[:5]:
        run.put(ticket)
    for ticket in first[5:7]:
        run.record(ticket, episode(1))
    run.hand_over(first[7])
    run.step()
    run.checkpoint()
    run.record(first[6], [sample(1, 1), answer(1)])
    again, *more = run.issue(7)
    for ticket in more[:5]:
        run.put(ticket)
    run.step()
    run.record(first[6], [sample(2, 2), answer(2)])
    late = run.issue(3)
    run.put(late[0])
    run.record(late[1], [RESET, sample(0, 2)])
    run.fork(1, 1)
    run.put(again)
    tickets = run.issue(20)
    for ticket in tickets:
        if ticket.turns and ticket.id.group < 4:
            samples = [r for r in ticket.turns if isinstance(r, RecordedSample)]
            begun = samples.pop() if samples[-1].partial else None
            last = sample(len(samples), 1, tokens=4)
            if begun is not None:  # of the turn in which the actor left
                last = replace(last, versions=np.append(begun.versions, last.versions[-1:]))
            run.record(ticket, [last])
            run.put_made(played(ticket, [*samples, last]))
        elif ticket.id.group < 6:
            run.put(ticket)
    run.step()
    run.checkpoint()
    return run


def measured(folder: Path) -> Simulated:
    """Turns were recorded once episodes took long, and some that took long came to no end."""
    run = Simulated(folder, turns_auto_s=60.0, env_retries=9)
    first = run.issue(1)
    run.put(first[0])

    def rounds(count: int, seconds: float) -> None:
        for _ in range(count):
            for ticket in run.issue(6):
                made = trajectory(ticket, (ticket.min_version[1],), float(ticket.id.index))
                run.put_made(replace(made, timings={"total": seconds + ticket.id.index}))
            run.step()

    rounds(2, 59.5)
    (ticket,) = run.issue(1)
    run.ahead = 100.0
    run.buffer.release("actor-0", [(ticket.id, 0)])
    rounds(2, 10.0)
    run.kill()
    assert [t.durable for t in (*first, *run.issue(3))] == [False, True, True, True]
    return run


def automatic(folder: Path) -> Simulated:
    """The bound was raised, lowered while groups waited that were admitted before, and left for a branch."""
    run = Simulated(folder, auto=Auto(0, 4, 1), max_staleness=4)

    def rounds(count: int, ess: float) -> None:
        run.told = Told(0.5, ess, 1e-3)
        for _ in range(count):
            for ticket in run.issue(20):
                run.put(ticket)
            run.now += 1.0
            run.step()

    rounds(4, 1.0)
    run.checkpoint()
    rounds(2, 0.5)
    run.kill()
    rounds(2, 0.5)
    run.fork(4, 4)
    rounds(4, 0.6)
    run.checkpoint()
    run.kill()
    rounds(4, 1.0)
    run.checkpoint()
    return run


def tuned(folder: Path) -> Simulated:
    """The slots were raised, and stayed over deaths of the buffer and a branch; a ticket was given back late."""
    run = Simulated(folder, auto=Auto(2, 4, 1), max_staleness=4, tuning=SlotLimits(1, 12, 3))

    def fill() -> None:
        while len(waiting(run)) < RULES["groups_per_step"]:
            tickets = run.issue(20)
            assert tickets, "nothing is admitted, and a batch is not full"
            for ticket in tickets:
                run.put(ticket)

    def rounds(count: int, waited: float) -> None:
        run.told = Told(waited, 1.0, 1e-3, 2.0)
        for _ in range(count):
            fill()
            run.now += 1.0
            run.step()

    rounds(3, 0.6)
    run.checkpoint()
    rounds(2, 0.6)
    run.kill()
    rounds(2, 0.1)
    run.fork(3, 3)
    rounds(6, 0.0)
    fill()
    lent = run.issue(20)
    rounds(1, 0.0)
    run.buffer.release("actor-0", [(lent[0].id, 0)])
    for ticket in lent[1:]:
        run.put(ticket)
    run.checkpoint()
    run.kill()
    rounds(6, 0.0)
    run.checkpoint()
    return run


def waiting(run: Simulated) -> list[Any]:
    return [group for group in run.buffer.ledger.live.values() if group.state == "waiting"]


def taught(folder: Path) -> Simulated:
    """A teacher on a server: a scorer was killed, leases lapsed and came back late, a branch began."""
    run = Simulated(folder, filters=(zero_variance,), max_staleness=2, **SCORED)
    run.log.flush_now()
    for ticket in run.issue(8):
        run.put(ticket)
    for ticket in run.issue(2):
        run.put(ticket, 1.0)  # which a filter drops
    run.score(1)
    (late,) = run.score(1, "scorer-1", bring=False)
    run.now += 100.0
    run.buffer.tick(run.now)
    run.score(2)
    put_scores(run.buffer, scores(run.buffer, late, "scorer-1", salt=9))
    run.step()
    run.checkpoint()
    (again,) = run.score(1, bring=False)
    run.buffer.scoring.joined("scorer-0")
    (back,) = run.score(1, bring=False)
    assert (back.group, back.attempt) == (again.group, 1)
    run.buffer.scoring.renew(run.now, "scorer-0", (), [(back.group, back.attempt)], "")
    run.score()
    run.kill()
    run.step("guard")
    run.checkpoint()
    for _ in range(2):
        for ticket in run.issue(6):
            run.put(ticket)
        run.score()
        run.step()
    run.fork(2, 1)
    for ticket in run.issue(6):
        run.put(ticket)
    run.score()
    run.step()
    run.checkpoint()
    for ticket in run.issue(4):
        run.put(ticket)
    run.score(1, bring=False)
    return run


KINDS: dict[str, Callable[[Path], Simulated]] = {
    "interrupted": interrupted,
    "forked": forked,
    "wait": awaited,
    "max_uses 2": used_twice,
    "replay": replayed,
    "evaluated": evaluated,
    "demonstrations": shown,
    "sft": supervised,
    "stopped": stopped,
    "recorded": recorded,
    "branched": branched,
    "measured": measured,
    "auto": automatic,
    "tuned": tuned,
    "taught": taught,
}
