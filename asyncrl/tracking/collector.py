"""The launcher's ear: takes what the roles report, makes one record per training step, hands it on.

    Reporter of each role ──PUSH──> Collector.poll ──> RunState (the picture) ──> records ──> metrics.jsonl, other sinks
                                         │                  └────────────────> View ─────> terminal
                                         └──> events, for the launcher to act on

`poll` returns when a message came or its time is up, never later; a sink cannot hold it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import zmq

from asyncrl.sockets import Listener
from asyncrl.tracking import messages
from asyncrl.tracking.report.report import write_report
from asyncrl.tracking.sinks import GuardedSink, Sink, jsonl
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
"""Messages that one poll takes, at most, so that a flood does not keep the launcher from its other work."""

MAX_BYTES = 1 << 20
"""Of one report; a peer that sends more is disconnected."""


class Collector:
    def __init__(self, run: RunFolder, config: Config, console: Console | None = None) -> None:
        """Binds the address `launcher` of the run. `console`: None shows nothing. Raises ValueError when the run's
        earlier metrics cannot be read, zmq.ZMQError when the address is taken."""
        self._run = run
        self._config = config
        self.state = RunState(time.time(), config.learner.steps, config.buffer.max_staleness)
        self.state.resume(jsonl.read(run.metrics))
        self.malformed = 0
        self._closed = False
        self._events: list[Event] = []
        self._usage = Usage()
        self._usage_at = 0.0
        self._jsonl: Sink | None = jsonl.JsonLines(run)
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
        """What each role waits for now; a role that works is not in it."""
        now = time.time()
        return {
            role: Waiting(state.cause, state.on, now - state.since)
            for role, state in self.state.roles.items()
            if state.cause is not None
        }

    def silent_s(self, role: str) -> float:
        """Seconds since the role last said anything; since the run began when it never did."""
        state = self.state.roles.get(role)
        return max(time.time() - (state.heard if state and state.heard else self.state.started), 0.0)

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened since the last poll; returns at once when something did, else after `timeout_s`."""
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
        """The launcher started the role anew."""
        self.state.restarted(role)
        self.event("restart", role, why=why)

    def exited(self, role: str, why: str = "") -> None:
        """The role's process ended and is not started again."""
        self.state.gone(role)
        self.event("exit", role, why=why)

    def event(self, kind: str, role: str = "launcher", **fields: Any) -> None:
        """An event of the launcher's own: into events.jsonl, to the sinks and the terminal; not returned by poll."""
        self._spread(Event(kind, role, time.time(), fields))

    def summary(self) -> dict[str, Any]:
        """The contents of summary.json. Success is None where there was no evaluation."""
        self._drain()
        now = time.time()
        run_state, values = self.state, self.state.now(now)
        # An actor that was killed took with it what it had counted since its last report; the ledger has what it put.
        put = values.get("buffer/count/generated", 0.0) * values.get("buffer/length/generated", 0.0)
        generated = max(values.get("throughput/tokens_generated", 0.0), put)
        trained = values.get("throughput/tokens_trained", 0.0)
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
        }

    def finish(self) -> None:
        """Takes what is still queued and lets the sinks finish, at most 30 s each. To be called while processes that
        they started (wandb has one) still live; `close` does it otherwise."""
        self._drain()
        summary = self.summary()
        while self._sinks:
            self._sinks.pop().close(summary)

    def close(self, summary: dict[str, Any] | None = None) -> None:
        """Finishes, writes the report and shows the end on the terminal. `summary`: as of `summary()`; its `outcome`
        and `why`, if there, are shown."""
        self.finish()
        summary = self.summary() if summary is None else summary
        self._closed = True
        self._listener.close()
        if self._jsonl is not None:
            self._jsonl.close(summary)
            self._jsonl = None
        self._report()
        if self._terminal is not None:
            self._terminal.close(summary)

    def _drain(self) -> None:
        if not self._closed:
            for message in self._messages():
                self._take(message)

    def _report(self) -> None:
        try:
            write_report(self._run)
        except Exception as error:  # pictures are not worth losing the end of a run for
            log.warning("no report: %s: %s", type(error).__name__, error)

    def _messages(self) -> Iterator[dict[str, Any]]:
        for _ in range(AT_ONCE):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = messages.decode(frame)
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
        if event is None:
            return
        self._events.append(event)
        if event.kind == "step":
            self._record(int(event.fields["step"]), event.t)
        elif event.kind != "waiting":
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
        self._write(lambda sink: sink.event(event))
        for sink in self._sinks:
            sink.event(event)
        if self._terminal is not None:
            self._terminal.event(event)

    def _write(self, what: Callable[[Sink], None]) -> None:
        """To metrics.jsonl or events.jsonl. What a full disk does not take is missing there; the run goes on."""
        if self._jsonl is None:
            return
        try:
            what(self._jsonl)
        except OSError as error:
            self._unwritten += 1
            if self._unwritten == 1:
                log.warning("a line was not written (further ones are only counted): %s", error)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
