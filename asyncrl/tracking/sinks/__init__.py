"""Where records go: a table of sinks, and the thread that keeps a slow or broken one away from the run."""

from __future__ import annotations

import importlib.util
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.errors import ConfigError
from asyncrl.plugins import resolve
from asyncrl.tracking.state import Event, Record

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.run_folder import RunFolder

log = logging.getLogger(__name__)

QUEUED = 10_000
"""Records kept for a sink that is slow; past it the sink has failed."""


class Sink(Protocol):
    """Takes records in the order of the run. May raise: then it is dropped, and the run goes on."""

    def record(self, record: Record) -> None: ...
    def event(self, event: Event) -> None: ...
    def close(self, summary: Mapping[str, Any]) -> None: ...


MakeSink = Callable[["RunFolder", "Config"], Sink]


def _jsonl(run: RunFolder, config: Config) -> Sink:
    from asyncrl.tracking.sinks.jsonl import JsonLines

    return JsonLines(run)


def _wandb(run: RunFolder, config: Config) -> Sink:
    from asyncrl.tracking.sinks.wandb import Wandb

    return Wandb(run, config)


def _trackio(run: RunFolder, config: Config) -> Sink:
    from asyncrl.tracking.sinks.trackio import Trackio

    return Trackio(run, config)


SINKS: dict[str, MakeSink] = {"jsonl": _jsonl, "wandb": _wandb, "trackio": _trackio}


def check(names: Sequence[str]) -> None:
    """What is asked for is there, so that a run of days is not begun without it. Raises ConfigError."""
    for name in names:
        try:
            resolve(name, SINKS, "tracking.sinks")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if name in ("wandb", "trackio") and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracking.sinks names {name}, which is not installed: pip install 'asyncrl[{name}]', or leave it out."
            )


class GuardedSink:
    """A sink in a thread of its own, made there too: neither its slowness nor its errors reach the run.

    The first error is warned of, counted in `failures`, and is the last thing that is asked of the sink.
    """

    def __init__(self, name: str, run: RunFolder, config: Config) -> None:
        self.name = name
        self.failures = 0
        self._queue: queue.Queue[Callable[[Sink], None]] = queue.Queue(QUEUED)
        self._closing = False
        self._thread = threading.Thread(target=self._work, args=(run, config), name=f"sink-{name}", daemon=True)
        self._thread.start()

    def record(self, record: Record) -> None:
        self._ask(lambda sink: sink.record(record))

    def event(self, event: Event) -> None:
        self._ask(lambda sink: sink.event(event))

    def close(self, summary: Mapping[str, Any], deadline_s: float = 30.0) -> None:
        """Lets the sink finish, for at most `deadline_s` seconds."""

        def last(sink: Sink) -> None:
            self._closing = True
            sink.close(summary)

        self._ask(last)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._fail(f"did not finish within {deadline_s:.0f} s: what it had not written yet is lost")

    def _ask(self, what: Callable[[Sink], None]) -> None:
        if self.failures:
            return
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self._fail(f"is {QUEUED} records behind")

    def _work(self, run: RunFolder, config: Config) -> None:
        try:
            sink = resolve(self.name, SINKS, "tracking.sinks")(run, config)
            while not self._closing and not self.failures:
                self._queue.get()(sink)
        except ModuleNotFoundError as error:
            self._fail(f"needs {error.name}: pip install 'asyncrl[{self.name}]'")
        except Exception as error:  # whatever a tracker does, the run goes on
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self.failures += 1
        log.warning("tracking.sinks: %s is dropped for the rest of the run: %s", self.name, why)
