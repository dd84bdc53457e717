"""The state of a run, from the latest reports of its roles. Pure: messages and times go in, records come out.

A value reported with a step belongs to that step; one without holds until its role reports a newer one.
A total that falls has restarted from 0: the earlier count is added. Steps that are done again (a learner that died
continues from its last checkpoint) count once.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from asyncrl.tracking.series import SERIES, find, rate_name

Record = dict[str, float]
"""One line of metrics.jsonl: the axes `step`, `wall_s`, `tokens`, and series by name."""

SAMPLED = "reward/held_out_success_sampled"
GREEDY = "reward/held_out_success_greedy"
HELD_OUT = "reward/held_out"
SHOWN = "weights/demonstrations/loss"
"""How the names of all series of evaluations begin."""

MAX_ROLES = 10_000
MAX_NAMES = 1 << 17
"""Names of series that are kept, over all roles: a family has as many as its reports name."""
MAX_CAUSES = 1024
"""Causes of waiting that are kept of earlier starts of one process."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once. `kind`: ready, step, waiting, or what the role named (published, eval, ...)."""

    kind: str
    role: str
    t: float
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RoleState:
    """The latest report of one process."""

    role: str
    pid: int = 0
    ready: bool = False
    heard: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    totals: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """By name: the count of earlier starts of the process, the count of this one, and the time of that report."""
    cause: str | None = None
    on: str = ""
    since: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds of waiting by cause, of this start of the process, as of `heard`."""
    waits_before: dict[str, float] = field(default_factory=dict)
    """Seconds of waiting by cause, of earlier starts of the process."""
    lost: int = 0
    unknown: int = 0
    over: bool = False
    """Whether it ended and is not restarted."""

    @property
    def kind(self) -> str:
        """The kind of role: `actor` for actor-3."""
        return self.role.split("-", 1)[0]

    def waited(self, now: float) -> dict[str, float]:
        """Seconds of waiting by cause since the run began, with the current wait."""
        seconds = dict(self.waits_before)
        for cause, s in self.waits.items():
            seconds[cause] = seconds.get(cause, 0.0) + s
        if self.cause is not None:
            seconds[self.cause] = seconds.get(self.cause, 0.0) + max(now - self.heard, 0.0)
        return seconds


class RunState:
    def __init__(self, started: float, steps: int, max_staleness: int) -> None:
        """`started`: time.time() at the start of the run. `steps`: `learner.steps`."""
        self.started = started
        self.steps = steps
        self.max_staleness = max_staleness
        self.roles: dict[str, RoleState] = {}
        self.restarts: dict[str, int] = {}
        self.step = 0
        self.last: Record = {}
        self.held_out: list[Record] = []
        self.max_staleness_seen = 0.0
        self.recent: deque[Record] = deque(maxlen=400)
        self._of_step: dict[str, float] = {}
        self._names: set[str] = set()
        """Those of all series that were reported."""
        self._offsets: dict[str, float] = {}
        self._carried: dict[str, float] = {}
        self._added: dict[str, dict[int, float]] = {}
        """By total that is reported with steps: what each step added to it, in order."""
        self._tokens_at: dict[int, float] = {}
        """Tokens trained after each step of an earlier launch."""
        self._waited_at_last: dict[str, dict[str, float]] = {}
        self._last_at = started

    def resume(self, records: Iterable[Record]) -> None:
        """Continue from the records of an earlier launch of the run: clock, totals, held-out results."""
        last: Record = {}
        for record in records:
            last |= record
            if "tokens" in record:
                self._tokens_at[int(record.get("step", 0))] = record["tokens"]
            self._keep(record)
        self.started -= last.get("wall_s", 0.0)
        self._carried = {name: value for name, value in last.items() if name in SERIES and SERIES[name].total}

    def take(self, message: Mapping[str, Any]) -> Event | None:
        """Take one message of a Reporter; returns the event in it, if any.

        Raises KeyError, TypeError or ValueError if it is malformed.
        """
        role, t, kind = str(message["role"]), float(message["t"]), str(message["kind"])
        if role not in self.roles and len(self.roles) >= MAX_ROLES:
            raise ValueError(f"{MAX_ROLES} roles have reported already")
        state = self.roles.setdefault(role, RoleState(role, since=t))
        if int(message["pid"]) != state.pid:
            state.waits_before, state.waits = dict(islice(state.waited(state.heard).items(), MAX_CAUSES)), {}
            state.pid, state.ready, state.values, state.over = int(message["pid"]), False, {}, False
        state.waits = {_plain(c): float(s) for c, s in message["waits"].items()}
        cause = message["cause"]
        state.cause, state.on, state.since = (_plain(cause) if cause else None), str(message["on"]), message["since"]
        state.heard, state.lost, state.unknown = t, int(message["lost"]), int(message["unknown"])
        if kind == "ready":
            state.ready = True
            return Event("ready", role, t)
        if kind == "waiting":
            return Event("waiting", role, t, {"cause": state.cause, "on": state.on})
        if kind == "event":
            return Event(str(message["event"]), role, t, dict(message["fields"]))
        if kind == "spans":
            return None
        if kind != "metrics":
            raise ValueError(f"kind is {kind!r}: expected ready, metrics, waiting, event or spans")
        step = message["step"]
        self._metrics(state, t, message["values"], None if step is None else int(step))
        return None if step is None else Event("step", role, t, {"step": int(step)})

    def gone(self, role: str, *, over: bool = True) -> None:
        """Forget the current values of a process that ended; its totals stay. `over`: it is not restarted."""
        state = self.roles.get(role)
        if state is not None:
            state.ready, state.values, state.cause, state.over = False, {}, None, over

    def restarted(self, role: str) -> None:
        self.gone(role, over=False)
        self.restarts[role] = self.restarts.get(role, 0) + 1

    def record(self, step: int, now: float) -> Record:
        """The record of training step `step`, which ended at `now`. Results of an evaluation that come behind the
        record of their step are a record of their own, which is merged with it."""
        if 0 < step <= self.step and self._of_step and all(name.startswith(HELD_OUT) for name in self._of_step):
            late: Record = {"step": float(step)} | self._of_step
            self._of_step = {}
            if SAMPLED in late or GREEDY in late:
                self.held_out.append(late)
            return late
        values = self.now(now)
        values |= self._of_step | self._waits(now)
        record = {
            "step": float(step),
            "wall_s": now - self.started,
            "tokens": values.get("throughput/tokens_trained", 0.0),
        }
        record |= dict(sorted(values.items()))
        self._of_step = {}
        self._last_at = now
        self._waited_at_last = {role: state.waited(now) for role, state in self.roles.items()}
        self._keep(record)
        return record

    def now(self, now: float) -> dict[str, float]:
        """The latest value of every series, over all roles."""
        values = {name: _across(name, values) for name, values in self._gathered().items()}
        for name in values:
            if name in self._carried:
                carried = self._carried.pop(name)
                self._offsets[name] = carried if values[name] < carried else 0.0
            values[name] += self._offsets.get(name, 0.0)
        values["staleness/bound"] = float(self.max_staleness)
        values["system/restarts"] = float(sum(self.restarts.values()))
        values |= {f"system/restarts/{role}": float(n) for role, n in self.restarts.items()}
        values["system/reports_lost"] = float(sum(s.lost for s in self.roles.values()))
        values["system/unknown_series"] = float(sum(s.unknown for s in self.roles.values()))
        return values

    def _gathered(self) -> dict[str, list[tuple[float, float]]]:
        """(time, value) of each series by role: the latest value, or the total over the role's processes."""
        gathered: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for state in self.roles.values():
            for name, value in state.values.items():
                gathered[name].append((state.heard, value))
            for name, (before, count, t) in state.totals.items():
                gathered[name].append((t, before + count))
        return gathered

    def put(self, values: Mapping[str, float], role: str, now: float) -> None:
        """Set values that the launcher measures itself."""
        state = self.roles.setdefault(role, RoleState(role, since=now))
        state.values |= values
        state.heard = now

    def _metrics(self, state: RoleState, t: float, values: Mapping[str, Any], step: int | None) -> None:
        for name, raw in values.items():
            series, value = find(name), float(raw)
            if series is None:
                raise ValueError(f"{name!r} is not in asyncrl/tracking/series.py")
            if name not in self._names and len(self._names) >= MAX_NAMES // max(len(self.roles), 1):
                raise ValueError(f"{len(self._names)} series of {len(self.roles)} roles are kept already")
            self._names.add(name)
            if series.total:
                self._count(state, t, name, value, step)
            elif step is not None:
                self._of_step[name] = value
            else:
                state.values[name] = value

    def _count(self, state: RoleState, t: float, name: str, value: float, step: int | None) -> None:
        """Take the value of a total, and derive its rate."""
        # The first count of a training step covers the time since the last record.
        before, count, then = state.totals.get(name, (0.0, 0.0, 0.0 if step is None else self._last_at))
        if value < count:
            before, count = before + count, 0.0
        if then and t > then:
            state.values[rate_name(name)] = (value - count) / (t - then)
        if step is not None:
            before -= self._done_again(name, step)
            self._added[name][step] = value - count
        state.totals[name] = (before, value, t)

    def _done_again(self, name: str, step: int) -> float:
        """What this step and later ones had added to a total when they were done before."""
        if name in self._carried:  # by an earlier launch
            last = self._carried.pop(name)
            self._offsets[name] = self._tokens_at.get(step - 1, last)
        added, subtracted = self._added.setdefault(name, {}), 0.0
        while added and next(reversed(added)) >= step:
            subtracted += added.popitem()[1]
        return subtracted

    def _waits(self, now: float) -> dict[str, float]:
        """Share of the time since the last record, by kind of role and cause; the mean over the roles of a kind."""
        passed = now - self._last_at
        if passed <= 0:
            return {}
        shares: dict[str, list[float]] = {}
        of_kind: dict[str, int] = {}
        for role, state in self.roles.items():
            if state.over:
                continue
            of_kind[state.kind] = of_kind.get(state.kind, 0) + 1
            before = self._waited_at_last.get(role, {})
            for cause, seconds in state.waited(now).items():
                share = min(max(seconds - before.get(cause, 0.0), 0.0) / passed, 1.0)
                shares.setdefault(f"waits/{state.kind}/{cause}", []).append(share)
        return {
            name: sum(values) / of_kind[name.split("/")[1]] for name, values in shares.items() if find(name) is not None
        }

    def _keep(self, record: Record) -> None:
        if SAMPLED in record or GREEDY in record:
            self.held_out.append(record)
        self.step = max(self.step, int(record.get("step", 0)))
        self.max_staleness_seen = max(self.max_staleness_seen, record.get("staleness/max", 0.0))
        self.last = record
        self.recent.append(record)


def _across(name: str, reported: list[tuple[float, float]]) -> float:
    """One value from (time, value) pairs of several roles."""
    series = find(name)
    values = [value for _, value in reported]
    match series.across if series else "last":
        case "sum":
            return sum(values)
        case "mean":
            return sum(values) / len(values)
        case "max":
            return max(values)
        case _:
            return max(reported)[1]


def _plain(cause: str) -> str:
    """A cause as part of a series' name."""
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", cause) or "unnamed"
