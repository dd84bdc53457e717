"""Everything that the roles said last, put together into one picture. Pure: messages and times go in, records come out.

What comes with a step belongs to that step; what comes without one holds until its role says something newer. A total
that falls started anew: what was counted before is kept, but for steps that are done again (a learner that died goes on
from its last checkpoint), which count once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.tracking.series import SERIES, find, rate_name

Record = dict[str, float]
"""One line of metrics.jsonl: the axes `step`, `wall_s`, `tokens`, and series by name."""

SAMPLED = "reward/held_out_success_sampled"
GREEDY = "reward/held_out_success_greedy"

MAX_ROLES = 10_000


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once. `kind`: ready, step, waiting, or what the role named (published, eval, ...)."""

    kind: str
    role: str
    t: float
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RoleState:
    """What one process said last."""

    role: str
    pid: int = 0
    ready: bool = False
    heard: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    totals: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Per name: what earlier starts of the process counted, what this one counted, when it said so."""
    cause: str | None = None
    on: str = ""
    since: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds per cause, of this start of the process, as of `heard`."""
    waits_before: dict[str, float] = field(default_factory=dict)
    lost: int = 0
    unknown: int = 0
    over: bool = False
    """It ended, and is not started again."""

    @property
    def kind(self) -> str:
        """actor-3 is an actor."""
        return self.role.split("-", 1)[0]

    def waited(self, now: float) -> dict[str, float]:
        """Seconds per cause since the run began, the wait that goes on included."""
        seconds = dict(self.waits_before)
        for cause, s in self.waits.items():
            seconds[cause] = seconds.get(cause, 0.0) + s
        if self.cause is not None:
            seconds[self.cause] = seconds.get(self.cause, 0.0) + max(now - self.heard, 0.0)
        return seconds


class Board:
    def __init__(self, started: float, steps: int, max_staleness: int) -> None:
        """`started`: time.time() of the run's beginning. `steps`: `learner.steps`."""
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
        self._offsets: dict[str, float] = {}
        self._carried: dict[str, float] = {}
        self._added: dict[str, dict[int, float]] = {}
        """Per total that comes with steps: what each step added to it, in order."""
        self._tokens_at: dict[int, float] = {}
        """Tokens trained after each step of an earlier launch."""
        self._waited_at_last: dict[str, dict[str, float]] = {}
        self._last_at = started

    def resume(self, records: Iterable[Record]) -> None:
        """Goes on where an earlier launch of the run stopped: clock, totals, held-out results."""
        last: Record = {}
        for record in records:
            last |= record
            self._tokens_at[int(record.get("step", 0))] = record.get("tokens", 0.0)
            self._keep(record)
        self.started -= last.get("wall_s", 0.0)
        self._carried = {name: value for name, value in last.items() if name in SERIES and SERIES[name].total}

    def take(self, message: Mapping[str, Any]) -> Event | None:
        """One message of a Reporter; the event in it, if it is one. Raises KeyError, TypeError, ValueError when
        it is malformed."""
        role, t, kind = str(message["role"]), float(message["t"]), str(message["kind"])
        if role not in self.roles and len(self.roles) >= MAX_ROLES:
            raise ValueError(f"{MAX_ROLES} roles have reported already")
        state = self.roles.setdefault(role, RoleState(role, since=t))
        if int(message["pid"]) != state.pid:
            state.waits_before, state.waits = state.waited(state.heard), {}
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
        if kind != "metrics":
            raise ValueError(f"kind is {kind!r}: expected ready, metrics, waiting or event")
        step = message["step"]
        self._metrics(state, t, message["values"], None if step is None else int(step))
        return None if step is None else Event("step", role, t, {"step": int(step)})

    def gone(self, role: str, *, over: bool = True) -> None:
        """The process ended: what it measured now is no longer so; what it counted stays. `over`: for good."""
        state = self.roles.get(role)
        if state is not None:
            state.ready, state.values, state.cause, state.over = False, {}, None, over

    def restarted(self, role: str) -> None:
        self.gone(role, over=False)
        self.restarts[role] = self.restarts.get(role, 0) + 1

    def record(self, step: int, now: float) -> Record:
        """What was measured when the training step `step` ended, `now`."""
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
        gathered: dict[str, list[tuple[float, float]]] = {}
        for state in self.roles.values():
            for name, value in state.values.items():
                gathered.setdefault(name, []).append((state.heard, value))
            for name, (before, count, t) in state.totals.items():
                gathered.setdefault(name, []).append((t, before + count))
        values = {name: _across(name, found) for name, found in gathered.items()}
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

    def put(self, values: Mapping[str, float], role: str, now: float) -> None:
        """Values that the launcher measures itself."""
        state = self.roles.setdefault(role, RoleState(role, since=now))
        state.values |= values
        state.heard = now

    def _metrics(self, state: RoleState, t: float, values: Mapping[str, Any], step: int | None) -> None:
        for name, raw in values.items():
            series, value = find(name), float(raw)
            if series is None:
                raise ValueError(f"{name!r} is not in asyncrl/tracking/series.py")
            if series.total:
                # The first count of a training step is that of the time since the last record.
                before, count, then = state.totals.get(name, (0.0, 0.0, 0.0 if step is None else self._last_at))
                if value < count:
                    before, count = before + count, 0.0
                if then and t > then:
                    state.values[rate_name(name)] = (value - count) / (t - then)
                if step is not None:
                    before -= self._again(name, step)
                    self._added[name][step] = value - count
                state.totals[name] = (before, value, t)
            elif step is not None:
                self._of_step[name] = value
            else:
                state.values[name] = value

    def _again(self, name: str, step: int) -> float:
        """What this step and later ones added to a total, when they were done before."""
        if name in self._carried:  # by an earlier launch
            last = self._carried.pop(name)
            self._offsets[name] = self._tokens_at.get(step - 1, last)
        added, again = self._added.setdefault(name, {}), 0.0
        while added and next(reversed(added)) >= step:
            again += added.popitem()[1]
        return again

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
            name: sum(found) / of_kind[name.split("/")[1]] for name, found in shares.items() if find(name) is not None
        }

    def _keep(self, record: Record) -> None:
        if SAMPLED in record or GREEDY in record:
            self.held_out.append(record)
        self.step = max(self.step, int(record.get("step", 0)))
        self.max_staleness_seen = max(self.max_staleness_seen, record.get("staleness/max", 0.0))
        self.last = record
        self.recent.append(record)


def _across(name: str, found: list[tuple[float, float]]) -> float:
    """One value out of those of several roles, each with the time it was said."""
    series = find(name)
    values = [value for _, value in found]
    match series.across if series else "last":
        case "sum":
            return sum(values)
        case "mean":
            return sum(values) / len(values)
        case "max":
            return max(values)
        case _:
            return max(found)[1]


def _plain(cause: str) -> str:
    """A cause as part of a series' name."""
    return re.sub(r"[^A-Za-z0-9_.\-]+", "_", cause) or "unnamed"
