"""The table of sinks, which take the records, and the thread that keeps a slow or broken sink away from the run."""

from __future__ import annotations

import importlib.util
import logging
import math
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
"""Records queued for a slow sink; past it the sink has failed."""


class Sink(Protocol):
    """Takes records in the order of the run. One that raises is dropped, and the run goes on."""

    def record(self, record: Record) -> None: ...
    def event(self, event: Event) -> None: ...
    def close(self, summary: Mapping[str, Any]) -> None: ...


SINKS: dict[str, str] = {
    "jsonl": "asyncrl.tracking.sinks.jsonl:JsonLines",
    "wandb": "asyncrl.tracking.sinks.wandb:Wandb",
    "trackio": "asyncrl.tracking.sinks.trackio:Trackio",
    "tensorboard": "asyncrl.tracking.sinks.tensorboard:TensorBoard",
}
"""Name -> import path of a callable `(run, config) -> Sink`."""

BUILT_IN = ("jsonl",)
"""Sinks that need no package. Each of the others needs the package, and the extra, of its own name."""


OVERVIEW: dict[str, str] = {
    "reward/mean": "0_overview/reward",
    "reward/success": "0_overview/success",
    "reward/held_out_success_sampled": "0_overview/held_out_success_sampled",
    "reward/held_out_success_greedy": "0_overview/held_out_success_greedy",
}
"""Series that a tracker's page opens on: trackers sort sections by name, and would open on `buffer/commit_ms`."""


def with_overview(record: Record) -> Record:
    """The record's finite values, with those of `OVERVIEW` a second time, under the name that comes first.

    >>> with_overview({"step": 1.0, "reward/mean": 0.5, "reward/std": float("nan")})
    {'step': 1.0, 'reward/mean': 0.5, '0_overview/reward': 0.5}
    """
    finite = {name: value for name, value in record.items() if math.isfinite(value)}
    return finite | {first: finite[name] for name, first in OVERVIEW.items() if name in finite}


def check(names: Sequence[str]) -> None:
    """Refuse a sink that does not exist or is not installed, before the run starts. Raises ConfigError."""
    for name in names:
        if name in SINKS and name not in BUILT_IN and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracking.sinks names {name}, which is not installed: pip install 'asyncrl[{name}]', or leave it out."
            )
        if name in SINKS:
            continue  # imported by its thread
        try:
            resolve(name, SINKS, "tracking.sinks")
        except ValueError as error:
            raise ConfigError(str(error)) from error


class GuardedSink:
    """A sink in a thread of its own, so that neither its slowness nor its errors reach the run.

    The first error is logged as a warning and counted in `failures`; the sink is not called again.
    """

    def __init__(self, name: str, run: RunFolder, config: Config) -> None:
        self.name = name
        self.failures = 0
        self._queue: queue.Queue[Callable[[Sink], None]] = queue.Queue(QUEUED)
        self._closing = False
        self._thread = threading.Thread(target=self._work, args=(run, config), name=f"sink-{name}", daemon=True)
        self._thread.start()

    def record(self, record: Record) -> None:
        self._put(lambda sink: sink.record(record))

    def event(self, event: Event) -> None:
        self._put(lambda sink: sink.event(event))

    def close(self, summary: Mapping[str, Any], deadline_s: float = 30.0) -> None:
        """Wait at most `deadline_s` seconds for the sink to finish."""

        def last(sink: Sink) -> None:
            self._closing = True
            sink.close(summary)

        self._put(last)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._fail(f"did not finish within {deadline_s:.0f} s: records that it had not written are lost")

    def _put(self, call: Callable[[Sink], None]) -> None:
        if self.failures:
            return
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self._fail(f"is {QUEUED} records behind")

    def _work(self, run: RunFolder, config: Config) -> None:
        try:
            sink = resolve(self.name, SINKS, "tracking.sinks")(run, config)
            while not self._closing and not self.failures:
                self._queue.get()(sink)
        except ModuleNotFoundError as error:
            self._fail(f"needs {error.name}: pip install 'asyncrl[{self.name}]'")
        except Exception as error:  # the run goes on, whatever the tracker raises
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self.failures += 1
        log.warning("tracking.sinks: %s is dropped for the rest of the run: %s", self.name, why)
