"""What the ledger does not have: rewards by part, the slowest tool call, and the text to search in.

A thread reads one trajectory after another, newest first, while somebody looks. In a live run it asks for a few per
second, so that the run does not notice.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from asyncrl.errors import RunError
from asyncrl.process.priority import lower_this_thread
from asyncrl.tracking.rollouts.sample import Rollout
from asyncrl.trajectory import Trajectory
from asyncrl.view.run import ViewedRun
from asyncrl.view.table import Key

TEXT_CHARS = 100_000
"""Characters of one trajectory that are searched."""
KEPT_CHARS = 128_000_000
"""Characters of all texts kept in memory; others are read again by each search."""
QUERY_CHARS = 200
LIVE_PAUSE_S = 0.2
SEARCH_S = 0.5
"""Seconds of one answer to a search; the next one goes on behind it."""
WATCHED_S = 15.0
"""After the last request of a page, seconds until a live run is left alone."""
REFRESH_S = 2.0
BEGIN_S = 1.0
"""After the first table was asked for."""


class Index:
    def __init__(self, run: ViewedRun) -> None:
        self._run = run
        self.details: dict[Key, list[Any]] = {}
        """For each trajectory that was read: rewards by name, the seconds of its slowest tool call, the mean advantage
        of its sampled tokens; None where that is not recorded."""
        self._texts: dict[Key, str | None] = {}
        """Lower case; None: not kept in memory, so read again."""
        self._chars = 0
        self.revision = 0
        self._watched = time.monotonic()
        self._over = threading.Event()
        self._begin = threading.Event()
        self._thread = threading.Thread(target=self._work, name="index", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def watched(self) -> None:
        """Somebody looks."""
        self._watched = time.monotonic()

    def begin(self) -> None:
        """The table has been shown: what follows does not delay it."""
        self._begin.set()

    @property
    def complete(self) -> bool:
        return len(self.details) >= len(self._run.keys())

    def search(self, query: str, first: int) -> dict[str, Any]:
        """The trajectories whose text has the words, without regard to case, from the `first`-th on, for `SEARCH_S`;
        `next` is None behind the last one."""
        wanted, until, keys = query[:QUERY_CHARS].lower(), time.monotonic() + SEARCH_S, self._run.keys()
        hits: list[Key] = []
        for place in range(max(first, 0), len(keys)):
            if time.monotonic() > until and place > first:
                return {"hits": hits, "next": place, "of": len(keys)}
            if wanted in self._text_of(keys[place]):
                hits.append(keys[place])
        return {"hits": hits, "next": None, "of": len(keys)}

    def add(self, key: Key) -> None:
        """Reads one trajectory."""
        try:
            trajectory, sample = self._run.find(*key)
        except RunError:
            self.details[key], self._texts[key] = [None, None, None], ""
            return
        found: Any = trajectory if trajectory is not None else sample
        seconds = [turn.environment for turn in found.turn_records if turn.environment is not None]
        self.details[key] = [dict(found.rewards), max(seconds, default=None), _advantage(sample)]
        self._keep(key, trajectory, sample)

    def _keep(self, key: Key, trajectory: Trajectory | None, sample: Rollout | None) -> str:
        text = self._run.words(trajectory, sample, TEXT_CHARS).lower()
        fits = self._chars + len(text) <= KEPT_CHARS
        self._texts[key] = text if fits else None
        self._chars += len(text) if fits else 0
        return text

    def _text_of(self, key: Key) -> str:
        if key not in self._texts:
            self.add(key)
        text = self._texts[key]
        if text is None:
            try:
                text = self._run.words(*self._run.find(*key), TEXT_CHARS).lower()
            except RunError:
                text = ""
        return text

    def _work(self) -> None:
        lower_this_thread()
        next_refresh = 0.0
        while not self._begin.wait(0.2) and not self._over.is_set():
            pass
        self._over.wait(BEGIN_S)
        while not self._over.wait(0.05):
            now = time.monotonic()
            watched = now - self._watched <= WATCHED_S
            if self._run.live and not watched:
                continue
            if watched and now >= next_refresh:
                self._run.refresh()
                next_refresh = time.monotonic() + REFRESH_S
            self._read_some(now + 0.5)

    def _read_some(self, until: float) -> None:
        keys = [key for key in reversed(self._run.keys()) if key not in self.details]
        for key in keys:
            if self._over.is_set() or time.monotonic() > until:
                break
            self.add(key)
            if self._over.wait(LIVE_PAUSE_S if self._run.live else 0.0):
                break
        self.revision += bool(keys)


def _advantage(sample: Rollout | None) -> float | None:
    """The mean advantage of the sampled tokens."""
    pairs = [pair for row in sample.rows for pair in zip(row.advantages, row.sampled, strict=True)] if sample else []
    values = [advantage for advantage, sampled in pairs if sampled and advantage is not None]
    return sum(values) / len(values) if values else None
