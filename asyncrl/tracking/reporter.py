"""Reports what a role measures and waits for to the launcher, without ever waiting for it.

A message is one msgpack map on a PUSH socket: {"role", "pid", "t": time.time(), "kind": "ready" | "metrics" | "waiting"
| "event" | "spans", ...}. If the launcher is away or slow, messages are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgpack
import zmq

from asyncrl.sockets import Endpoint, Link
from asyncrl.tracking.series import find
from asyncrl.tracking.spans import Span

log = logging.getLogger(__name__)

HIGH_WATER = 1000
"""Messages queued for a launcher that does not read; about 1 MB."""
SPANS_AT_ONCE = 256
SPANS_S = 1.0
"""Spans are sent when there are so many, or the first is so old and another is reported."""


class WaitClock:
    """Seconds per cause of waiting. Pure: time is an argument, any clock that does not run backwards.

    >>> clock = WaitClock(now=0.0)
    >>> clock.wait("ticket", 2.0), clock.wait(None, 5.0), clock.wait("ticket", 6.0)
    (True, True, True)
    >>> clock.seconds(7.0)
    {'ticket': 4.0}
    """

    def __init__(self, now: float) -> None:
        self.cause: str | None = None
        self.on = ""
        self.since = now
        self._seconds: dict[str, float] = {}

    def wait(self, cause: str | None, now: float, on: str = "") -> bool:
        """Record that the process waits for `cause` from `now` on (None: it works); returns whether this is new."""
        if cause == self.cause and on == self.on:
            return False
        if cause != self.cause:
            if self.cause is not None:
                self._seconds[self.cause] = self._seconds.get(self.cause, 0.0) + max(now - self.since, 0.0)
            self.since = now
        self.cause, self.on = cause, on
        return True

    def seconds(self, now: float) -> dict[str, float]:
        """Seconds waited so far, by cause, with the current wait."""
        so_far = dict(self._seconds)
        if self.cause is not None:
            so_far[self.cause] = so_far.get(self.cause, 0.0) + max(now - self.since, 0.0)
        return so_far


class Reporter:
    """One per process; any of its threads may call it. Never blocks, and never raises after its construction."""

    def __init__(self, address: Endpoint | str, role: str, *, strict: bool = False) -> None:
        """`address`: where the launcher listens (`RunFolder.address("launcher")`). `strict`: raise ValueError for a
        series that is not in the table, for tests; otherwise it is left out and counted, with one warning."""
        self.role = role
        self.lost = 0
        self.unknown = 0
        self._strict = strict
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._clock = WaitClock(time.time())
        self._spans: list[Span] = []
        self._link: Link[zmq.Socket[bytes]] = Link(
            zmq.Context.instance(), zmq.PUSH, address, SNDHWM=HIGH_WATER, LINGER=500
        )
        self._socket = self._link.socket

    def ready(self) -> None:
        """Report that this process has started and can do its work."""
        self._send("ready", {})

    def metrics(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Report the latest values by name (tracking/series.py); the learner adds `step`, once per training step."""
        listed = {}
        for name, value in values.items():
            if find(name) is None:
                self._unknown(name)
            else:
                listed[name] = float(value)
        self._send("metrics", {"values": listed, "step": step})
        self._send_spans()

    def waiting(self, cause: str | None, on: str = "") -> None:
        """Report what this process waits for from now on (None: it works), and on whom; cheap if nothing changed."""
        now = time.time()
        with self._lock:
            before, since = self._clock.cause, self._clock.since
            changed = self._clock.wait(cause, now, on)
        if changed:
            self._send("waiting", {})
        if before is not None and before != cause:
            self.span(f"wait: {before}", now - since, end=now)

    def span(self, name: str, seconds: float, mark: int | None = None, end: float | None = None) -> None:
        """Report that this process did `name` for `seconds` until `end` (time.time(); default: now), for `mark`: a
        policy version or a batch. Spans are sent together, at most `SPANS_S` late while more are reported."""
        span = Span(name, time.time() if end is None else end, max(seconds, 0.0), mark)
        with self._lock:
            self._spans.append(span)
            due = len(self._spans) >= SPANS_AT_ONCE or span.end - self._spans[0].end >= SPANS_S
        if due:
            self._send_spans()

    def _send_spans(self) -> None:
        with self._lock:
            spans, self._spans = self._spans, []
        if spans:
            self._send("spans", {"spans": spans})

    def event(self, kind: str, **fields: Any) -> None:
        """Report that something happened: published, checkpoint, eval, restart, guard, ended ..."""
        self._send("event", {"event": kind, "fields": fields})

    def close(self) -> None:
        """Send what is queued, for at most half a second."""
        self._send_spans()
        with self._lock:
            self._link.close()

    def _unknown(self, name: str) -> None:
        if self._strict:
            raise ValueError(f"{name!r} is not in asyncrl/tracking/series.py. Add it there or use a name from it.")
        self.unknown += 1
        if name not in self._warned:
            self._warned.add(name)
            log.warning("series %r is not in asyncrl/tracking/series.py: left out", name)

    def _send(self, kind: str, body: dict[str, Any]) -> None:
        with self._lock:
            now = time.time()
            # Every message carries all waiting times, so that a lost message loses nothing.
            body |= {
                "role": self.role, "pid": os.getpid(), "t": now, "kind": kind,
                "waits": self._clock.seconds(now), "cause": self._clock.cause, "on": self._clock.on,
                "since": self._clock.since, "lost": self.lost, "unknown": self.unknown,
            }  # fmt: skip
            try:
                self._socket.send(msgpack.packb(body, default=str), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self.lost += 1  # zmq.Again: the launcher does not read; otherwise the socket is closed
                log.debug("a %s message was dropped: %s", kind, error)
