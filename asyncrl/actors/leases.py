"""Leases are renewed outside the event loop, and only for episodes that get on.

So an environment that blocks the event loop cannot let the leases of its neighbours lapse at once, and one that never
returns cannot hold its ticket for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.actors.episodes.episode import Progress
from asyncrl.errors import RunError
from asyncrl.trajectory import Lease as Lease

log = logging.getLogger(__name__)

BLOCKED_S = 30.0
"""The event loop gives a sign of life twice a second; a shorter silence is a busy machine, not a blocked loop."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an episode may take."""

    idle_s: float
    """`actors.episode_idle_s`"""
    episode_s: float
    """`actors.episode_s`"""

    def exhausted(self, now: float, started: float, progress: Progress, engine_moved: float) -> str:
        """Why the episode is given up, or nothing. All times by one clock.

        While it waits for its tokens it gets on as long as the engine does; once it is over, and only its
        acknowledgement is awaited, it is never given up.

        >>> Patience(2.0, 9.0).exhausted(5.0, 0.0, Progress(1.0), 0.0)
        'no progress for 4 s in phase environment (actors.episode_idle_s is 2)'
        """
        if progress.phase == "put":
            return ""
        if now - started > self.episode_s:
            return f"it lasts {now - started:.0f} s (actors.episode_s is {self.episode_s:g})"
        last = max(progress.at, engine_moved) if progress.phase == "generate" else progress.at
        if now - last > self.idle_s:
            idle = f"no progress for {now - last:.0f} s in phase {progress.phase}"
            return f"{idle} (actors.episode_idle_s is {self.idle_s:g})"
        return ""


@dataclass(frozen=True, slots=True)
class _Held:
    progress: Progress
    started: float
    give_up: Callable[[str, str], None]


class LeaseKeeper:
    """A thread that renews what is held every `every_s`, and gives up what made no progress or was revoked."""

    def __init__(
        self,
        renew: Callable[[Sequence[Lease]], Sequence[Lease]],
        generated: Callable[[], float],
        patience: Patience,
        every_s: float,
    ) -> None:
        """
        Args:
            renew: asks the buffer; returns the leases that it revoked. RunError: it did not answer.
            generated: tokens that the engine has generated, so that its progress can be seen.
            every_s: well below the lease's term.
        """
        self._renew, self._generated, self._patience, self._every_s = renew, generated, patience, every_s
        self._held: dict[Lease, _Held] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._engine_moved = self._beat = time.monotonic()
        self._seen = -1.0
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def hold(self, lease: Lease, progress: Progress, give_up: Callable[[str, str], None]) -> None:
        """`give_up(reason, detail)` is called in the keeper's thread; reason: `timeout` or `revoked`."""
        with self._lock:
            self._held[lease] = _Held(progress, progress.at, give_up)

    def drop(self, lease: Lease) -> None:
        with self._lock:
            self._held.pop(lease, None)

    def leased(self) -> list[Lease]:
        with self._lock:
            return list(self._held)

    def beat(self) -> None:
        """Called by the event loop, as a sign that it turns."""
        self._beat = time.monotonic()

    def look(self, now: float) -> None:
        """One round."""
        if (generated := self._generated()) != self._seen:
            self._seen, self._engine_moved = generated, now
        with self._lock:
            held = dict(self._held)
        for lease, h in list(held.items()):
            if why := self._patience.exhausted(now, h.started, h.progress, self._engine_moved):
                del held[lease]
                self.drop(lease)
                h.give_up("timeout", f"episode {lease[0]}: {why}")
        if not held:
            return
        try:
            revoked = self._renew(list(held))
        except RunError as error:
            log.warning("leases were not renewed: %s", error)
            return
        for lease in revoked:
            if lease in held:
                self.drop(lease)
                held[lease].give_up("revoked", f"the buffer took back the lease of {lease[0]}")

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            now = time.monotonic()
            if now - self._beat > max(self._patience.idle_s, BLOCKED_S):
                # Nothing in this process can cancel a function that blocks the event loop.
                log.critical(
                    "the event loop has stood still for %.0f s (actors.episode_idle_s): an environment blocks it, "
                    "for instance with time.sleep in an async method. The actor ends; its tickets are lent again.",
                    now - self._beat,
                )
                os._exit(1)
            try:
                self.look(now)
            except Exception:
                log.exception("a round of the leases failed; the next one tries again")
