"""Evaluation sets: held-out tasks, each played `eval.samples` times and once greedily, all by one pinned version.

Outside admission, training data and the equation. While a set is open only its tickets are issued.
"""

from __future__ import annotations

import json
from typing import Any

from asyncrl.buffer.client.messages import EvalReply, EvalResult, PutOutcome
from asyncrl.buffer.ledger.database import Database
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.buffer.tasks.drawing import checked_task
from asyncrl.buffer.tasks.sources import ticket_seed
from asyncrl.buffer.tickets.leases import ActiveLease, Leases
from asyncrl.data.base import TaskSource
from asyncrl.data.checked import readable
from asyncrl.errors import ConfigError
from asyncrl.trajectory import Ticket, TicketId, Trajectory

FIRST_NUMBER = 1 << 40
"""Eval tickets have group numbers from here on, which no training group ever reaches."""
_TASKS_PER_SET = 1 << 20
RESTARTS = 2


def place_of(group: int) -> tuple[int, int]:
    """Serial of the set and number of the task, from the group number of a ticket."""
    return divmod(group - FIRST_NUMBER, _TASKS_PER_SET)


class EvalSets:
    def __init__(
        self, database: Database, rules: Rules, source: TaskSource, leases: Leases, made: tuple[int, int]
    ) -> None:
        """`made`: branch and version of the newest weights that can exist; an open set of later ones, which an older
        release took from a forged message, ends as failed."""
        self._db = database
        self._rules = rules
        self._source = source
        self._leases = leases
        self._tasks = min(rules.eval_tasks, source.held_out_size)
        if self._tasks >= _TASKS_PER_SET:
            raise ConfigError(f"eval.tasks is {rules.eval_tasks}, at most {_TASKS_PER_SET - 1} are possible.")
        self._per_task = rules.eval_samples + rules.eval_greedy
        self.serial: int | None = None
        """Serial of the open set."""
        self._label = ""
        self._pinned = (0, 0)
        self._todo: list[tuple[int, int]] = []
        self._attempts: dict[tuple[int, int], int] = {}
        self._failures: dict[tuple[int, int], int] = {}
        self._why = ""
        self._last_failure = ""
        """Why an episode of this set failed, since this process began."""
        for row in list(database.read("SELECT serial, label, branch, version FROM evals WHERE state = 'open'")):
            if row[2:] > made:
                database.write("UPDATE evals SET state = 'failed' WHERE serial = ?", (row[0],))
            else:
                self._enter(*row)

    @property
    def pinned(self) -> tuple[int, int] | None:
        """Branch and version of the open set."""
        return self._pinned if self.is_open else None

    @property
    def is_open(self) -> bool:
        return self.serial is not None

    @property
    def total(self) -> int:
        return self._tasks * self._per_task

    def open(self, label: str, version: tuple[int, int]) -> None:
        """Idempotent per label. Raises Refused while another set is open."""
        if self.knows(label):
            return
        if self.serial is not None:
            raise Refused("eval_open", f"evaluation {self._label!r} is open; {label!r} has to wait for it")
        self._begin(label, version)

    def knows(self, label: str) -> bool:
        """The set is open or done."""
        return bool(list(self._db.read("SELECT 1 FROM evals WHERE label = ? AND state IN ('open', 'done')", (label,))))

    def _begin(self, label: str, version: tuple[int, int]) -> None:
        serial = self._db.write(
            "INSERT INTO evals(label, branch, version, state) VALUES (?, ?, ?, 'open')", (label, *version)
        )
        self._enter(serial, label, *version)
        self._close_if_done()

    def _enter(self, serial: int, label: str, branch: int, version: int) -> None:
        self.serial, self._label, self._pinned = serial, label, (branch, version)
        self._attempts, self._failures, self._why, self._last_failure = {}, {}, "", ""
        done = set(self._db.read("SELECT task, idx FROM eval_results WHERE serial = ?", (serial,)))
        every = ((task, index) for task in range(self._tasks) for index in range(self._per_task))
        self._todo = [key for key in every if key not in done]

    def issue(self, now: float, actor: str, held: tuple[int, int], credits: int) -> tuple[list[Ticket], str]:
        if held > self._pinned and not any(lease.eval for lease in self._leases):
            self._restart(held)
        if self.serial is None or held != self._pinned:
            self._why = f"{actor} holds weights {held}, evaluation {self._label!r} is pinned to {self._pinned}"
            return [], self._why
        tickets: list[Ticket] = []
        base = FIRST_NUMBER + self.serial * _TASKS_PER_SET
        for task, index in self._todo:
            if len(tickets) == credits:
                break
            if self._leases.get(base + task, index) is None:
                tickets.append(self._ticket(now, actor, base, task, index))
        self._why = "" if tickets else "the last episodes of the evaluation are being played"
        return tickets, self._why

    def _ticket(self, now: float, actor: str, base: int, task: int, index: int) -> Ticket:
        attempt = self._attempts.get((task, index), 0)
        self._attempts[task, index] = attempt + 1
        id = TicketId(self._pinned[0], base + task, index)
        self._leases.add(now, id, attempt, actor, self._pinned[1], eval=True)
        temperature = self._rules.temperature if index < self._rules.eval_samples else 0.0
        seed = ticket_seed(self._rules.actors_seed, "eval", 0, task, index, attempt)  # the same episodes at every eval
        place = f"held-out task {task}"
        held_out = checked_task(readable(lambda: self._source.held_out(task), place), place)
        return Ticket(
            id, attempt, "eval", held_out, self._pinned, self._per_task, temperature, seed, self._rules.lease_s
        )

    def _restart(self, version: tuple[int, int]) -> None:
        """The pinned version is no longer available: begins the whole set again at the latest one, at most twice."""
        rows = self._db.read("SELECT count(*) FROM evals WHERE label = ? AND state = 'restarted'", (self._label,))
        if next(iter(rows))[0] >= RESTARTS:
            self._db.write("UPDATE evals SET state = 'failed' WHERE serial = ?", (self.serial,))
            self.serial = None
            return
        self._db.write("UPDATE evals SET state = 'restarted' WHERE serial = ?", (self.serial,))
        self._begin(self._label, version)

    def receive(self, trajectory: Trajectory, digest: str) -> PutOutcome:
        serial, task = place_of(trajectory.id.group)
        index = trajectory.id.index
        stored = list(
            self._db.read(
                "SELECT digest FROM eval_results WHERE serial = ? AND task = ? AND idx = ?", (serial, task, index)
            )
        )
        if stored:
            return "duplicate" if stored[0][0] == digest else "late"
        if serial != self.serial or (task, index) not in self._todo:
            return "late"
        versions = {trajectory.oldest_version, trajectory.newest_version}
        if trajectory.id.branch != self._pinned[0] or versions != {self._pinned[1]}:
            lease = self._leases.get(trajectory.id.group, index)
            if lease is not None and lease.is_of((trajectory.id, trajectory.attempt), trajectory.actor):
                self._leases.remove(trajectory.id.group, index)
            raise Refused(
                "eval_mixed",
                f"an evaluation episode met versions {sorted(versions)} on branch {trajectory.id.branch}; the set is "
                f"pinned to {self._pinned}: it is played again",
            )
        self._leases.remove(trajectory.id.group, index)
        self._record(task, index, trajectory.task_id, trajectory.reward, dict(trajectory.rewards), digest)
        return "stored"

    def fail(self, id: TicketId, attempt: int, detail: str) -> bool:
        """The episode is tried again within `env.retries`; then it counts as failed, never as reward 0. Returns whether
        this ended an attempt."""
        lease = self._leases.get(id.group, id.index)
        if lease is None or (lease.id, lease.attempt) != (id, attempt) or self.serial is None:
            return False
        self._last_failure = detail
        self._leases.remove(id.group, id.index)
        key = (place_of(id.group)[1], id.index)
        self._failures[key] = self._failures.get(key, 0) + 1
        if self._failures[key] > self._rules.env_retries:
            self._record(*key, "", 0.0, None, "")
        return True

    def release(self, lease: ActiveLease) -> None:
        self._leases.remove(lease.id.group, lease.id.index)

    def _record(self, task: int, idx: int, task_id: str, reward: float, rewards: Any, digest: str) -> None:
        greedy = idx >= self._rules.eval_samples
        self._db.write(
            "INSERT INTO eval_results VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (self.serial, task, idx, task_id, greedy, reward, json.dumps(rewards), digest),
        )
        self._todo.remove((task, idx))
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self.serial is not None and not self._todo:
            self._db.write("UPDATE evals SET state = 'done' WHERE serial = ?", (self.serial,))
            self.serial = None

    def reply(self, label: str) -> EvalReply:
        """Raises Refused for an unknown label, and for a set that met too many versions."""
        rows = list(
            self._db.read("SELECT serial, branch, version, state FROM evals WHERE label = ? ORDER BY 1", (label,))
        )
        if not rows:
            raise Refused("unknown_eval", f"no evaluation {label!r} was opened")
        serial, branch, version, state = rows[-1]
        if state == "failed":
            raise Refused(
                "eval_failed", f"evaluation {label!r} was begun {len(rows)} times and lost its version each time"
            )
        results = []
        failed = 0
        for task_id, greedy, reward, rewards, digest in self._db.read(
            "SELECT task_id, greedy, reward, rewards, digest FROM eval_results WHERE serial = ? ORDER BY task, idx",
            (serial,),
        ):
            if digest:
                results.append(EvalResult(task_id, bool(greedy), reward, json.loads(rewards), (branch, version)))
            else:
                failed += 1
        last = f"; the last one: {self._last_failure[:600]}" if self._last_failure else ""
        why = f"{failed} episodes failed in their environment{last}" if failed else ""
        done = state == "done"
        return EvalReply(done, len(results) + failed, self.total, results if done else [], why if done else self._why)
