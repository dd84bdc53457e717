"""The evaluation sets: due at some versions, opened together at one pin, finished, begun again, skipped.

    published(v), v a multiple of eval.every ──> every set opens, pinned to v; or is skipped while one is open
    evaluate(v), before the first and after the last step ──> every set opens, and every actor plays
    all its results are there ──> done, measured;  the pin is lost ──> it starts again at the newest version, twice

The identity of a set is (branch, version at which it was due, name): it is evaluated once, however often the step is
redone. While a set is open its players (players.py) get its tickets; the other actors train.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.buffer.client.messages import EvalReply, EvalSetReply, PutOutcome
from asyncrl.buffer.evaluations.measures import measures, of_row, row_of
from asyncrl.buffer.evaluations.open_set import OpenSet, size_of
from asyncrl.buffer.evaluations.places import place_of
from asyncrl.buffer.evaluations.players import Players
from asyncrl.buffer.evaluations.stops import Stops, fixed
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.buffer.tickets.leases import ActiveLease, Leases
from asyncrl.data.base import TaskSource
from asyncrl.tracking.rollouts.held_out import FORMAT, About, Answers
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from asyncrl.wire import Frame

RESTARTS = 2
_SHOWN = 600
"""Characters of a failure that the learner is told."""

Version = tuple[int, int]
"""(branch, version)"""


class EvalSets:
    def __init__(
        self,
        database: Database,
        rules: Rules,
        sources: Mapping[str, TaskSource],
        leases: Leases,
        stops: Stops,
        made: Version,
        answers: Answers | None = None,
    ) -> None:
        """
        Args:
            sources: of each set, by name.
            stops: is told of results.
            made: the newest weights that can exist; an open set of later ones, which an older release took from a
                forged message, ends as failed, and so does one that the configuration no longer has.
            answers: keeps the episodes of some tasks.
        """
        self._db, self._rules, self._leases, self._sources, self._stops = database, rules, leases, sources, stops
        self._answers = answers
        self._sets = {each.name: each for each in rules.eval_sets}
        self.players = Players(rules.eval_reserved, rules.eval_share, rules.lease_s)
        self.total = sum(size_of(each, sources[name]) * each.per_task for name, each in self._sets.items())
        """Tickets of all sets."""
        self.everyone = False
        """Whether every actor plays what is open."""
        self._open: dict[int, OpenSet] = {}
        self._failures: dict[int, str] = {}
        """Why an episode of a set that is done failed, by the set's serial."""
        opened = "SELECT serial, name, on_branch, version FROM evals WHERE state = 'open' ORDER BY serial"
        for serial, name, *pinned in list(database.read(opened)):
            if tuple(pinned) > made or name not in self._sets:
                self._end(serial, "failed")
            else:
                self._enter(serial, name, (pinned[0], pinned[1]))

    @property
    def pinned(self) -> Version | None:
        """The version of what is open."""
        return next((each.pinned for each in self._open.values()), None)

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    # Opening

    def evaluate(self, version: Version) -> None:
        """Opens what was not evaluated at this version before, though it may have been skipped. Raises Refused while
        something else is open."""
        if not (missing := [name for name in self._sets if not self._known(name, version, ("failed", "skipped"))]):
            self.everyone = self.is_open
            return
        if self.is_open:
            raise Refused("eval_open", f"the evaluation of {self.pinned} is open; that of {version} has to wait for it")
        self._begin(missing, version)
        self.everyone = self.is_open

    def due(self, version: Version) -> None:
        """These weights were published: opens the sets that are due at them, or skips them while one is open."""
        every = self._rules.eval_every
        if not every or version[1] % every or not version[1]:
            return
        missing = [name for name in self._sets if not self._known(name, version)]
        if not self.is_open:
            self._begin(missing, version)
            return
        for name in missing:
            self._end(self._insert(name, version, version, "skipped"), "skipped")

    def known(self, version: Version) -> bool:
        """Whether every set was opened at this version."""
        return all(self._known(name, version, ("failed", "skipped")) for name in self._sets)

    def _known(self, name: str, due: Version, but: tuple[str, ...] = ("failed",)) -> bool:
        """It was opened, or skipped; `but` these states do not count."""
        found = self._db.read("SELECT state FROM evals WHERE name = ? AND branch = ? AND due = ?", (name, *due))
        return any(state not in but for (state,) in found)

    def _begin(self, names: list[str], version: Version) -> None:
        for name in names:
            self._enter(self._insert(name, version, version, "open"), name, version)
        self._close_finished()

    def _insert(self, name: str, due: Version, pinned: Version, state: str) -> int:
        return self._db.write(
            "INSERT INTO evals(name, branch, due, on_branch, version, state, opened_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (name, *due, *pinned, state, self._db.wall_clock()),
        )

    def _enter(self, serial: int, name: str, pinned: Version) -> None:
        self._open[serial] = OpenSet(
            self._db,
            self._rules,
            self._leases,
            held_out=self._sets[name],
            source=self._sources[name],
            serial=serial,
            pinned=pinned,
        )

    # Playing

    def plays(self, now: float, actor: str) -> bool:
        """Whether this actor, which asks for tickets, plays what is open."""
        if not self.is_open:
            self.players.heard(now, actor)
            return False
        held = self._leases.evals  # every such lease is of an episode that an open set still lacks
        leased, wanted = actor in held, held.total() < sum(each.total - each.finished for each in self._open.values())
        return self.players.plays(now, actor, wanted, leased) or self.everyone

    def issue(self, now: float, actor: str, held: Version, credits: int) -> tuple[list[Ticket], str]:
        """For an actor that plays."""
        if held != self.pinned:
            return [], f"{actor} holds weights {held}, the evaluation is pinned to {self.pinned}"
        tickets: list[Ticket] = []
        for each in self._open.values():
            tickets += each.issue(now, actor, credits - len(tickets))
        return tickets, "" if tickets else "the last episodes of the evaluation are being played"

    def receive(self, trajectory: Trajectory, digest: str, record: Frame) -> PutOutcome:
        serial, task = place_of(trajectory.id.group)
        result = "SELECT digest FROM eval_results WHERE serial = ? AND task = ? AND idx = ?"
        stored = list(self._db.read(result, (serial, task, trajectory.id.index)))
        if stored:
            return "duplicate" if stored[0][0] == digest else "late"
        if (of := self._open.get(serial)) is None:
            return "late"
        outcome = of.receive(trajectory, digest)
        if outcome == "stored" and self._answers is not None and task < self._answers.tasks:
            self._answers.add(self._about(serial, task, trajectory), bytes(record))
        self._close_finished()
        return outcome

    def _about(self, serial: int, task: int, t: Trajectory) -> About:
        identity = "SELECT name, branch, due, on_branch, version FROM evals WHERE serial = ?"
        ((name, branch, due, *played),) = self._db.read(identity, (serial,))
        index, greedy = t.id.index, t.id.index >= self._sets[name].samples
        version = (played[0], played[1])
        return About(FORMAT, name, task, t.task_id, index, greedy, branch, due, version, t.reward)

    def fail(self, id: TicketId, attempt: int, detail: str) -> bool:
        """Returns whether this ended an attempt."""
        of = self._open.get(place_of(id.group)[0])
        ended = of is not None and of.fail(id, attempt, detail)
        self._close_finished()
        return ended

    def release(self, lease: ActiveLease) -> None:
        self._leases.remove(lease.id.group, lease.id.index)

    # Ending

    def lost(self, pinned: Version, newest: Version) -> None:
        """The pinned version can no longer be had: what is open starts again at the newest one, at most twice."""
        if pinned != self.pinned:
            return
        again = list(self._open.items())
        self._open.clear()
        for serial, each in again:
            each.revoke()
            due = "SELECT branch, due FROM evals WHERE serial = ?"
            identity = next((branch, v) for branch, v in self._db.read(due, (serial,)))
            began = "SELECT count(*) FROM evals WHERE name = ? AND branch = ? AND due = ? AND state = 'restarted'"
            if next(iter(self._db.read(began, (each.name, *identity))))[0] >= RESTARTS:
                self._end(serial, "failed")
                continue
            self._end(serial, "restarted")
            self._enter(self._insert(each.name, identity, newest, "open"), each.name, newest)
        self._close_finished()

    def _end(self, serial: int, state: str) -> None:
        values = (state, self._db.wall_clock(), fixed(self._db), serial)
        self._db.write("UPDATE evals SET state = ?, ended_at = ?, fixed = ? WHERE serial = ?", values)

    def _close_finished(self) -> None:
        for serial, each in list(self._open.items()):
            if each.done:
                del self._open[serial]
                self._failures |= {serial: each.last_failure[:_SHOWN]} if each.last_failure else {}
                self._end(serial, "done")
                self._measure(serial, each.name)
                self._stops.measured()
        if not self._open:
            self.everyone = False
            self.players.over()

    def _measure(self, serial: int, name: str) -> None:
        results = (
            "SELECT task_id, greedy, reward, rewards, digest FROM eval_results WHERE serial = ? ORDER BY task, idx"
        )
        for way, measured in measures(self._db.read(results, (serial,)), self._sets[name]).items():
            values = (serial, way, *row_of(measured))
            self._db.write(f"INSERT INTO eval_measures VALUES ({', '.join('?' * len(values))})", values)

    # What the learner is told

    def reply(self) -> EvalReply:
        """Where the latest evaluation stands, and how the one before it ended: that may have been after the learner
        looked last, and before it published the version of the latest."""
        evaluations = "SELECT branch, due FROM evals WHERE state != 'skipped' GROUP BY branch, due"
        newest = list(self._db.read(f"{evaluations} ORDER BY max(serial) DESC LIMIT 2"))
        sets = [each for identity in reversed(newest) for each in self._latest(identity).values()]
        failures = [each.last_failure for each in self._open.values() if each.last_failure]
        why = f"; the last failed episode: {failures[-1][:_SHOWN]}" if failures else ""
        results = [(m.branch, m.due, m.share) for m in self._stops.ranked()]
        undecided = (
            [identity for identity in newest if self._undecided(identity)] if self._rules.choosing.keep_best else []
        )
        finished, total = (sum(getattr(each, x) for each in self._open.values()) for x in ("finished", "total"))
        at = f"{finished} of {total} episodes at version {self.pinned[1]}{why}" if self.pinned else ""
        return EvalReply(not self._open, self.pinned, finished, total, sets, at, results=results, undecided=undecided)

    def _undecided(self, identity: Version) -> bool:
        """Whether the version at which it was due plays it now, and so may be the best."""
        of_it = "SELECT serial FROM evals WHERE branch = ? AND due = ? AND (on_branch, version) = (branch, due)"
        is_open = any(serial in self._open for (serial,) in self._db.read(of_it, identity))
        return is_open and self._stops.passed(identity)

    def _latest(self, identity: tuple[Any, ...]) -> dict[str, EvalSetReply]:
        columns = "serial, name, on_branch, version, state, opened_at, ended_at"
        of_identity = f"SELECT {columns} FROM evals WHERE branch = ? AND due = ? AND state != 'skipped' ORDER BY serial"
        skipped = dict(self._db.read("SELECT name, count(*) FROM evals WHERE state = 'skipped' GROUP BY name"))
        found = {}
        for serial, name, branch, version, state, opened_at, ended_at in list(self._db.read(of_identity, identity)):
            failed = "SELECT count(*) FROM eval_results WHERE serial = ? AND digest = ''"
            found[name] = EvalSetReply(
                serial=serial,
                name=name,
                branch=identity[0],
                due=identity[1],
                version=(branch, version),
                state=state,
                measures=self._measures(serial),
                failed=next(iter(self._db.read(failed, (serial,))))[0],
                skipped=skipped.get(name, 0),
                seconds=max(0.0, (ended_at or opened_at) - opened_at),
                failure=self._failures.get(serial, ""),
            )
        return found

    def _measures(self, serial: int) -> dict[str, Any]:
        columns = "way, share, low, high, tasks, episodes, failed, reward, reward_half, pass_at"
        rows = self._db.read(f"SELECT {columns} FROM eval_measures WHERE serial = ?", (serial,))
        return {way: of_row(tuple(row)) for way, *row in rows}
