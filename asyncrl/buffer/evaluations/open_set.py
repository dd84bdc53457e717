"""One open evaluation set: its tickets, all pinned to one version, and its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.buffer.client.messages import PutOutcome
from asyncrl.buffer.evaluations.places import TASKS_PER_SET, number_of, place_of
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.buffer.tasks.drawing import checked_task
from asyncrl.buffer.tasks.sources import ticket_seed
from asyncrl.buffer.tickets.leases import Leases
from asyncrl.config.held_out import HeldOutSet
from asyncrl.data.base import TaskSource
from asyncrl.data.checked import readable
from asyncrl.errors import ConfigError
from asyncrl.trajectory import Ticket, TicketId, Trajectory


def size_of(held_out: HeldOutSet, source: TaskSource) -> int:
    """How many tasks are played. Raises ConfigError."""
    tasks = min(held_out.tasks, source.held_out_size)
    if tasks >= TASKS_PER_SET:
        raise ConfigError(f"set {held_out.name} of eval has {tasks} tasks, at most {TASKS_PER_SET - 1} are possible.")
    return tasks


class OpenSet:
    """Changes go through the ledger's open transaction."""

    def __init__(
        self,
        database: Database,
        rules: Rules,
        leases: Leases,
        *,
        held_out: HeldOutSet,
        source: TaskSource,
        serial: int,
        pinned: tuple[int, int],
    ) -> None:
        """`pinned`: branch and version."""
        self._db, self._rules, self._leases = database, rules, leases
        self._set, self._source, self.serial, self.pinned = held_out, source, serial, pinned
        self.name = held_out.name
        self._attempts: dict[tuple[int, int], int] = {}
        self._failures: dict[tuple[int, int], int] = {}
        self.last_failure = ""
        """Why an episode failed, since this process began."""
        self.total = size_of(held_out, source) * held_out.per_task
        done = set(database.read("SELECT task, idx FROM eval_results WHERE serial = ?", (serial,)))
        every = ((task, index) for task in range(size_of(held_out, source)) for index in range(held_out.per_task))
        self._todo = dict.fromkeys(key for key in every if key not in done)

    @property
    def done(self) -> bool:
        return not self._todo

    @property
    def finished(self) -> int:
        return self.total - len(self._todo)

    def issue(self, now: float, actor: str, credits: int) -> list[Ticket]:
        tickets: list[Ticket] = []
        for task, index in self._todo:
            if len(tickets) == credits:
                break
            if self._leases.get(number_of(self.serial, task), index) is None:
                tickets.append(self._ticket(now, actor, task, index))
        return tickets

    def _ticket(self, now: float, actor: str, task: int, index: int) -> Ticket:
        attempt = self._attempts.get((task, index), 0)
        self._attempts[task, index] = attempt + 1
        id = TicketId(self.pinned[0], number_of(self.serial, task), index)
        self._leases.add(now, id, attempt, actor, self.pinned[1], eval=True)
        seed = ticket_seed(self._rules.actors_seed, "eval", 0, task, index, attempt)  # the same episodes at every eval
        place = f"held-out task {task}"
        played = checked_task(readable(lambda: self._source.held_out(task), place), place)
        return Ticket(
            id, attempt, "eval", played, self.pinned, self._set.per_task, self._set.temperature_of(index), seed,
            self._rules.lease_s, eval_set=self.name,
        )  # fmt: skip

    def receive(self, trajectory: Trajectory, digest: str) -> PutOutcome:
        """Raises Refused for an episode of another version than the pinned one; its ticket is then free again."""
        _, task = place_of(trajectory.id.group)
        index = trajectory.id.index
        if (task, index) not in self._todo:
            return "late"
        versions = trajectory.oldest_version, trajectory.newest_version
        if (trajectory.id.branch, *versions) != (*self.pinned, self.pinned[1]):
            lease = self._leases.get(trajectory.id.group, index)
            if lease is not None and lease.is_of((trajectory.id, trajectory.attempt), trajectory.actor):
                self._leases.remove(trajectory.id.group, index)
            raise Refused(
                "eval_mixed",
                f"an evaluation episode met versions {sorted(set(versions))} on branch {trajectory.id.branch}; the set "
                f"is pinned to {self.pinned}: it is played again",
            )
        self._leases.remove(trajectory.id.group, index)
        self._record(task, index, trajectory.task_id, trajectory.reward, trajectory.rewards, (digest, *versions))
        return "stored"

    def fail(self, id: TicketId, attempt: int, detail: str) -> bool:
        """The episode is tried again within `env.retries`; then it counts as failed, never as reward 0. Returns whether
        this ended an attempt."""
        lease = self._leases.get(id.group, id.index)
        if lease is None or (lease.id, lease.attempt) != (id, attempt):
            return False
        self.last_failure = detail
        self._leases.remove(id.group, id.index)
        key = (place_of(id.group)[1], id.index)
        self._failures[key] = self._failures.get(key, 0) + 1
        if self._failures[key] > self._rules.env_retries:
            self._record(*key, "", 0.0, {}, ("", None, None))
        return True

    def revoke(self) -> None:
        """Ends its leases."""
        for lease in self._leases:
            if lease.eval and place_of(lease.id.group)[0] == self.serial:
                self._leases.remove(lease.id.group, lease.id.index)

    def _record(
        self, task: int, idx: int, task_id: str, reward: float, rewards: Mapping[str, float], sampled: tuple[Any, ...]
    ) -> None:
        """`sampled`: digest, and the oldest and the newest version of a policy token; "" and None: it failed."""
        greedy = idx >= self._set.samples
        said = json.dumps(dict(rewards)) if sampled[0] else "null"
        self._db.write(
            "INSERT INTO eval_results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (self.serial, task, idx, task_id, greedy, reward, said, *sampled),
        )
        del self._todo[task, idx]
