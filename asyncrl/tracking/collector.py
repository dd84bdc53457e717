"""Receives the reports of the roles, makes one record per training step, and passes it to the sinks.

    Reporter of each role ──PUSH──> Collector.poll ──> RunState (state.py) ──> records ──> metrics.jsonl, other sinks
                                         │                  └────────────────> View ─────> terminal
                                         └──> events, for the launcher to act on

`poll` returns when a message has arrived or its time is up; a sink cannot delay it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import zmq

from asyncrl import redaction
from asyncrl.sockets import Listener
from asyncrl.tracking import messages
from asyncrl.tracking.eval_events import ToldResults
from asyncrl.tracking.report.chosen import chosen, notes
from asyncrl.tracking.report.report import write_report
from asyncrl.tracking.sinks import GuardedSink, Sink, jsonl
from asyncrl.tracking.spans import SpanLog
from asyncrl.tracking.state import GREEDY, SAMPLED, Event, Record, RunState
from asyncrl.tracking.terminal.live import Terminal
from asyncrl.tracking.terminal.view import Waiting
from asyncrl.tracking.usage import Usage
from asyncrl.wire import WireError

if TYPE_CHECKING:
    from rich.console import Console

    from asyncrl.config import Config
    from asyncrl.run_folder import RunFolder

log = logging.getLogger(__name__)

PACKAGES = ("asyncrl", "torch", "transformers", "numpy", "pyzmq", "vllm", "wandb", "trackio")
AT_ONCE = 2000
"""Maximum of messages in one poll, so that a flood does not keep the launcher from its other work."""

DRAWING_S = 30.0
"""Seconds after which, at the end of a run, no further plot of the report is begun."""

MAX_BYTES = 1 << 20
"""Largest report; a peer that sends a larger one is disconnected."""


class Collector:
    def __init__(self, run: RunFolder, config: Config, console: Console | None = None) -> None:
        """Bind the address `launcher` of the run; without `console` nothing is shown.

        Raises ValueError if the run's earlier metrics cannot be read, zmq.ZMQError if the address is in use.
        """
        self._run = run
        self._config = config
        self.state = RunState(time.time(), config.learner.steps, config.buffer.most_staleness)
        self.state.resume(jsonl.read(run.metrics))
        self.malformed = 0
        self.why_ended = ""
        """Why the learner ended the run."""
        self._closed = False
        self._events: list[Event] = []
        self._told = ToldResults(run.path / "events.jsonl")
        self._usage = Usage()
        self._usage_at = 0.0
        self._jsonl: Sink | None = jsonl.JsonLines(run)
        self._spans = SpanLog(run.spans, config.tracking.trace_every)
        self._unwritten = 0
        self._listener = Listener(zmq.PULL, run.address("launcher"), MAX_BYTES, {zmq.RCVHWM: 100_000})
        self._socket = self._listener.socket
        self._sinks = [GuardedSink(name, run, config) for name in config.tracking.sinks if name != "jsonl"]
        self._terminal = Terminal(console, self.state, run.path) if console is not None else None

    @property
    def ready(self) -> frozenset[str]:
        """Roles that have started and can do their work."""
        return frozenset(role for role, state in self.state.roles.items() if state.ready)

    @property
    def waiting(self) -> dict[str, Waiting]:
        """What each role waits for now, without those that work."""
        now = time.time()
        return {
            role: Waiting(state.cause, state.on, now - state.since)
            for role, state in self.state.roles.items()
            if state.cause is not None
        }

    def silent_s(self, role: str) -> float:
        """Seconds since the last report of the role, or since the run began."""
        state = self.state.roles.get(role)
        return max(time.time() - (state.heard if state and state.heard else self.state.started), 0.0)

    def poll(self, timeout_s: float) -> list[Event]:
        """The events since the last poll; returns as soon as there is one, else after `timeout_s`."""
        if self._socket.poll(int(timeout_s * 1000)):
            self._drain()
        now = time.time()
        if now - self._usage_at >= self._config.tracking.system_s:
            self._usage_at = now
            pids = {role: s.pid for role, s in self.state.roles.items() if s.pid} | {"launcher": os.getpid()}
            self.state.put(self._usage.sample(pids, now), "launcher", now)
        if self._terminal is not None:
            self._terminal.refresh(now)
        events, self._events = self._events, []
        return events

    def restarted(self, role: str, why: str) -> None:
        """Record that the launcher restarted the role."""
        self.state.restarted(role)
        self.event("restart", role, why=why)

    def exited(self, role: str, why: str = "") -> None:
        """Record that the role's process ended and is not restarted."""
        self.state.gone(role)
        self.event("exit", role, why=why)

    def event(self, kind: str, role: str = "launcher", **fields: Any) -> None:
        """Pass an event of the launcher to events.jsonl, the sinks and the terminal; `poll` does not return it."""
        self._spread(Event(kind, role, time.time(), fields))

    def summary(self) -> dict[str, Any]:
        """The contents of summary.json. Success is None if there was no evaluation."""
        self._drain()
        now = time.time()
        run_state, values = self.state, self.state.now(now)
        # The counts of a killed actor since its last report are lost; the ledger has what it put.
        put = values.get("buffer/count/generated", 0.0) * values.get("buffer/length/generated", 0.0)
        of_actors, of_learner = (
            values.get(name) or run_state.carried(name)
            for name in ("throughput/tokens_generated", "throughput/tokens_trained")
        )
        generated, trained = max(of_actors, put), of_learner
        wall_s = now - run_state.started
        first, last = (run_state.held_out[0], run_state.held_out[-1]) if run_state.held_out else ({}, {})
        if len(run_state.held_out) == 1:
            last = {}
        return {
            "held_out_success_start": first.get(SAMPLED),
            "held_out_success_end": last.get(SAMPLED),
            "held_out_success_greedy_start": first.get(GREEDY),
            "held_out_success_greedy_end": last.get(GREEDY),
            "wall_s": round(wall_s, 2),
            "steps": run_state.step,
            "max_staleness_seen": int(run_state.max_staleness_seen),
            "tokens_generated": int(generated),
            "tokens_trained": int(trained),
            "tokens_generated_per_s": round(generated / wall_s, 1),
            "tokens_trained_per_s": round(trained / wall_s, 1),
            "restarts": dict(run_state.restarts),
            "waits_s": {
                role: {cause: round(s, 2) for cause, s in sorted(state.waited(now).items())}
                for role, state in sorted(run_state.roles.items())
                if role != "launcher"
            },
            "versions": {"python": platform.python_version(), **_versions()},
            **chosen(self._run, self._config),
        }

    def finish(self) -> None:
        """Take what is still queued and let the sinks finish, at most 30 s each.

        To be called while processes that the sinks started (wandb has one) still run; otherwise `close` calls it.
        """
        self._drain()
        summary = self.summary()
        while self._sinks:
            self._sinks.pop().close(summary)

    def close(self, summary: dict[str, Any] | None = None, hurry: Callable[[], bool] = lambda: False) -> None:
        """Finish, write the report and show the end on the terminal, with `outcome` and `why` of `summary`, if any.
        Once `hurry` is true, or after `DRAWING_S`, the report's other plots are left out."""
        self.finish()
        summary = self.summary() if summary is None else summary
        self._closed = True
        self._listener.close()
        self._spans.close()
        if self._jsonl is not None:
            self._jsonl.close(summary)
            self._jsonl = None
        self._report(hurry, notes(summary))
        if self._terminal is not None:
            self._terminal.close(summary)

    def _drain(self) -> None:
        if not self._closed:
            for message in self._messages():
                self._take(message)

    def _report(self, hurry: Callable[[], bool], notes: list[tuple[str, str]]) -> None:
        deadline = time.monotonic() + DRAWING_S
        try:
            if left_out := write_report(self._run, lambda: hurry() or time.monotonic() > deadline, notes):
                log.warning(
                    "%d plots of the report were left out: asyncrl report %s",
                    left_out,
                    shlex.quote(str(self._run.path)),
                )
        except Exception as error:  # a failed picture must not break the end of a run
            log.warning("no report: %s: %s", type(error).__name__, error)

    def _messages(self) -> Iterator[dict[str, Any]]:
        for _ in range(AT_ONCE):
            try:
                frames = self._listener.receive(1)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise WireError(f"a report has one frame, got {len(frames)}")
                message = messages.decode(frames[0].buffer, max(self.state.steps, self.state.step))
            except WireError as error:
                self._refuse(error)
                continue
            yield message

    def _take(self, message: dict[str, Any]) -> None:
        try:
            event = self.state.take(message)
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(error)
            return
        if message["kind"] == "spans":
            self._write(lambda _: self._spans.append(message["role"], message["spans"], self.state.step))
        if event is None:
            return
        self._events.append(event)
        if event.kind == "ended":
            self.why_ended = str(event.fields.get("why", ""))
        if event.kind == "step":
            self._record(int(event.fields["step"]), event.t)
        elif event.kind != "waiting" and not self._told.seen_before(event.kind, event.fields):
            self._spread(event)

    def _refuse(self, error: Exception) -> None:
        self.malformed += 1
        if self.malformed == 1:
            log.warning("a malformed report was refused (further ones are only counted): %r", error)

    def _record(self, step: int, now: float) -> None:
        record: Record = self.state.record(step, now)
        record |= {f"system/sink_failures/{s.name}": float(s.failures) for s in self._sinks if s.failures}
        self._write(lambda sink: sink.record(record))
        for sink in self._sinks:
            sink.record(record)
        if self._terminal is not None:
            self._terminal.record(record)

    def _spread(self, event: Event) -> None:
        event = replace(event, fields=redaction.redacted(event.fields))
        self._write(lambda sink: sink.event(event))
        for sink in self._sinks:
            sink.event(event)
        if self._terminal is not None:
            self._terminal.event(event)

    def _write(self, call: Callable[[Sink], None]) -> None:
        """Write to metrics.jsonl, events.jsonl or spans.jsonl. Lines that a full disk refuses are missing there; the
        run goes on."""
        if self._jsonl is None:
            return
        try:
            call(self._jsonl)
        except OSError as error:
            self._unwritten += 1
            if self._unwritten == 1:
                log.warning("a line was not written (further ones are only counted): %s", error)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
