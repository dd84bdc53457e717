"""Renews leases from a thread, and only for episodes that make progress.

So an environment that blocks the event loop for a while does not let the leases of other episodes lapse, and an
environment that never returns cannot hold its ticket for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.actors.episodes.progress import Progress
from asyncrl.errors import RunError
from asyncrl.trajectory import Lease

log = logging.getLogger(__name__)

ANNOUNCE_S = 1.0
"""Seconds between two ticket requests that list the leases held; the list would be most of a request's cost."""
BLOCKED_S = 30.0
"""Seconds without a sign of life, which comes twice a second, before the event loop counts as blocked; a shorter gap
means a busy machine."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The time limits of an episode."""

    idle_s: float
    """`actors.episode_idle_s`"""
    episode_s: float
    """`actors.episode_s`"""
    most_s: float = 0.0
    """`actors.episode_max_s`; up to it each finished turn gives the episode `episode_s` more."""

    def exhausted(self, now: float, progress: Progress, engine_moved: float) -> str:
        """Why the episode is given up; empty if it is not. All times are of one clock.

        While the episode waits for tokens, progress of the engine counts as its own. While it waits for the buffer, to
        store a turn or to acknowledge the trajectory, it is never given up. The time in which recorded turns are
        stepped again does not count for the longest episode; each of them is a finished turn.

        >>> Patience(2.0, 9.0).exhausted(5.0, Progress(1.0), 0.0)
        'no progress for 4 s in phase environment (actors.episode_idle_s is 2)'
        """
        if progress.phase in ("record", "put"):
            return ""
        lasted, since = now - progress.started - progress.again_s, now - progress.turn_at
        if lasted > max(self.most_s, self.episode_s):
            name = "actors.episode_max_s" if self.most_s > self.episode_s else "actors.episode_s"
            return f"it has lasted {lasted:.0f} s ({name} is {max(self.most_s, self.episode_s):g})"
        if since > self.episode_s:
            return f"it has finished no turn for {since:.0f} s (actors.episode_s is {self.episode_s:g})"
        last = max(progress.at, engine_moved) if progress.phase == "generate" else progress.at
        if now - last > self.idle_s:
            idle = f"no progress for {now - last:.0f} s in phase {progress.phase}"
            return f"{idle} (actors.episode_idle_s is {self.idle_s:g})"
        return ""


@dataclass(frozen=True, slots=True)
class _Watched:
    progress: Progress
    give_up: Callable[[str, str], None]


class LeaseKeeper:
    """A thread that renews leases every `every_s`, and gives up episodes without progress or with a revoked lease."""

    def __init__(
        self,
        renew: Callable[[Sequence[Lease]], Sequence[Lease]],
        generated: Callable[[], float],
        patience: Patience,
        every_s: float,
    ) -> None:
        """
        Args:
            renew: renews leases at the buffer; returns those that it revoked. RunError: the buffer did not answer.
            generated: number of tokens that the engine has generated; growth is progress.
            every_s: seconds between two renewals, well below the term of a lease.
        """
        self._renew, self._generated, self._patience, self._every_s = renew, generated, patience, every_s
        self.failed_rounds = 0
        """Rounds that renewed nothing: the buffer did not answer, or an error, which is in the log."""
        self._watched: dict[Lease, _Watched] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._engine_moved = self._beat = time.monotonic()
        self._seen, self._announced = -1.0, float("-inf")
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def hold(self, lease: Lease, progress: Progress, give_up: Callable[[str, str], None]) -> None:
        """Renew `lease` from now on. `give_up(reason, detail)` is called in the keeper's thread; reason: `timeout` or
        `revoked`."""
        with self._lock:
            self._watched[lease] = _Watched(progress, give_up)

    def drop(self, lease: Lease) -> None:
        with self._lock:
            self._watched.pop(lease, None)

    def leased(self) -> list[Lease]:
        with self._lock:
            return list(self._watched)

    def announced(self, now: float) -> list[Lease]:
        """The leases that a request for tickets lists: all of them, once per `ANNOUNCE_S`; otherwise none."""
        if now - self._announced < ANNOUNCE_S:
            return []
        self._announced = now
        return self.leased()

    def beat(self) -> None:
        """Sign of life of the event loop."""
        self._beat = time.monotonic()

    def look(self, now: float) -> None:
        """Give up what made no progress, renew the rest."""
        if (generated := self._generated()) != self._seen:
            self._seen, self._engine_moved = generated, now
        with self._lock:
            watched = dict(self._watched)
        for lease, one in list(watched.items()):
            if why := self._patience.exhausted(now, one.progress, self._engine_moved):
                del watched[lease]
                self.drop(lease)
                one.give_up("timeout", f"episode {lease[0]}: {why}")
        if not watched:
            return
        try:
            revoked = self._renew(list(watched))
        except RunError as error:
            self.failed_rounds += 1
            log.warning("leases were not renewed: %s", error)
            return
        for lease in revoked:
            if lease in watched:
                self.drop(lease)
                watched[lease].give_up("revoked", f"the buffer revoked the lease of {lease[0]}")

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            now = time.monotonic()
            if now - self._beat > max(self._patience.idle_s, BLOCKED_S):
                # Nothing in this process can cancel a function that blocks the event loop.
                log.critical(
                    "the event loop has stood still for %.0f s (actors.episode_idle_s): an environment blocks it, "
                    "for instance with time.sleep in an async method. The actor ends; its tickets are issued again.",
                    now - self._beat,
                )
                os._exit(1)
            try:
                self.look(now)
            except Exception:  # without renewals every episode of this actor would be lost
                self.failed_rounds += 1
                log.exception("renewing the leases failed; the next round tries again")
