"""The scorer: complete groups in, a teacher's scores of their sampled tokens out.

    buffer ──complete group──> a thread: its rows, one after the other ──> the teacher's servers (servers.py)
       ▲                                                                        │
       └── scores, after their line in the log <── logprobs of the tokens <─────┘

takes      groups, as many as there are free slots (`learner.teacher.score_slots`), while a server answers
gives      the scores of each; a group back, if no server answers
unblocked by   a complete group; the server's answers; a server that serves again
ends       when it is told to, whatever the servers do: its groups go back; on unusable scores, with an error that
           ends the run and says the remedy

The loop itself never waits for a server: it renews the leases of the groups in work with every request to the buffer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.buffer.client.blocking import BlockingBuffer, scores_too_large
from asyncrl.buffer.client.messages import GroupLease, ScoringReply
from asyncrl.buffer.client.retry import through_outages
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.process.daemon_threads import DaemonThreads
from asyncrl.scorer.dialects import TeacherUnusable
from asyncrl.scorer.requests import TeacherSilent
from asyncrl.scorer.score_log import ScoreLog
from asyncrl.scorer.servers import TeacherServers
from asyncrl.tracking.reporter import Reporter
from asyncrl.wire.teacher_scores import GroupScores, TrajectoryScores

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.1
"""Longest time that the buffer may hold a request, and so the longest delay of a put."""


@dataclass(slots=True)
class _Work:
    lease: GroupLease
    future: Future[tuple[TrajectoryScores, ...]]
    began: float
    revoked: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.lease.group, self.lease.attempt


class Scorer:
    def __init__(
        self,
        name: str,
        config: Config,
        *,
        buffer: BlockingBuffer,
        servers: TeacherServers,
        score_log: ScoreLog,
        reporter: Reporter,
    ) -> None:
        self._name, self._config, self._buffer = name, config, buffer
        self._servers, self._score_log, self._reporter = servers, score_log, reporter
        self._slots = config.learner.teacher.score_slots
        self._threads = DaemonThreads()
        """One per slot, and one that checks the servers. Waiting for a hung server keeps no process alive."""
        self._work: list[_Work] = []
        self._looking: Future[None] | None = None
        self._returned: list[tuple[int, int]] = []
        self._stop = threading.Event()
        self._sent = float("-inf")
        self.groups = 0
        """Number of groups whose scores were stored."""
        self._tokens, self._seconds = 0, 0.0

    def stop(self) -> None:
        """Ends the loop after its current turn. Safe in a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Returns after `stop`. Raises TeacherUnusable, ConfigError or BufferRefused: each ends the run."""
        self._ask(lambda: self._buffer.hello("scorer"))
        while not self._stop.is_set():
            self._look_at_servers()
            self._put_what_is_done()
            self._take_groups()
            self._report()
        self._leave()

    def _look_at_servers(self) -> None:
        """Checks the servers in a thread, since they may be slow; raises what the last check raised."""
        if self._looking is not None and self._looking.done():
            done, self._looking = self._looking, None
            done.result()
        if self._looking is None:
            self._looking = self._threads.submit(self._servers.look, time.monotonic())

    def _put_what_is_done(self) -> None:
        for work in [work for work in self._work if work.future.done()]:
            self._work.remove(work)
            if work.revoked:
                continue
            try:
                scores = work.future.result()
            except TeacherSilent:
                self._returned.append(work.key)
            else:
                self._put(work, scores)

    def _put(self, work: _Work, scores: tuple[TrajectoryScores, ...]) -> None:
        lease, identity = work.lease, self._servers.identity
        assert identity is not None
        found = GroupScores(
            lease.branch, lease.group, lease.attempt, self._name, identity.digest, lease.digests, scores
        )
        if why := scores_too_large(found):  # the buffer would close the connection
            raise TeacherUnusable(why)
        made = self._score_log.announced(found)
        outcome = self._ask(lambda: self._buffer.scored(made))
        if outcome == "late":
            log.info("the scores of group %d came too late", lease.group)
            return
        self._score_log.write(made)
        self.groups += 1
        self._tokens += sum(len(each) for each in scores)
        self._seconds += time.monotonic() - work.began

    def _take_groups(self) -> None:
        why_silent = self._servers.silence
        credits = 0 if why_silent else self._slots - len(self._work)
        returned, self._returned = self._returned, []
        held = [work.key for work in self._work if not work.revoked]
        # At most POLL_S: there may be work or a silent server to look at again.
        reply = self._ask(
            lambda: self._buffer.scoring(
                credits, held, POLL_S, returned=returned, silent=why_silent, logged=self._score_log.head
            )
        )
        for work in self._work:
            work.revoked |= work.key in reply.revoked
        trajectories = iter(reply.trajectories)
        for lease in reply.groups:
            own = [next(trajectories) for _ in lease.digests]
            future = self._threads.submit(self._servers.score, own)
            self._work.append(_Work(lease, future, time.monotonic()))
        self._tell(reply, why_silent)

    def _tell(self, reply: ScoringReply, why_silent: str) -> None:
        if why_silent:
            self._reporter.waiting("teacher", why_silent[:500])
        elif self._work:
            slow = self._servers.unanswered
            self._reporter.waiting("teacher" if slow else None, slow)
        else:
            self._reporter.waiting("groups", f"buffer: {reply.why}")

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._sent < self._config.tracking.system_s:
            return
        self._sent = now
        self._reporter.metrics(
            {
                "teacher/scored_tokens": float(self._tokens),
                "teacher/score_s": self._seconds / max(1, self.groups),
                "teacher/server_failures": float(self._servers.failures),
            }
        )

    def _leave(self) -> None:
        """Gives the groups in work back; if the buffer does not answer in time, their leases lapse."""
        held = [work.key for work in self._work] + self._returned
        try:
            self._buffer.scoring(0, [], 0.0, returned=held, silent="the scorer ends", logged=self._score_log.head)
        except RunError as error:
            log.info("the groups in work were not given back, their leases lapse: %s", error)

    def _ask(self, request: Callable[[], T]) -> T:
        """The buffer's answer; an outage is waited out, up to `launch.restart_window_s`."""

        def again() -> bool:
            self._reporter.waiting("buffer", "buffer")
            return not self._stop.is_set()

        return through_outages(request, self._config.launch.restart_window_s, again)
