"""The scorer: complete groups in, a teacher's scores of their sampled tokens out.

    buffer ──complete group──> a thread: its rows, one after the other ──> the teacher's servers (servers.py)
       ▲                                                                        │
       └── scores, after their line in the log <── logprobs of the tokens <─────┘

takes      groups, as many as there are free slots (`learner.teacher.score_slots`), while a server answers
gives      the scores of each; a group back, if no server answers
unblocked by   a complete group; the server's answers; a server that serves again
ends       when it is told to, whatever the servers do: its groups go back. On scores that nobody may train on, with the
           remedy: the run ends

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
"""Longest time that the buffer may hold a request: results are put at least so often."""


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
        acks: ScoreLog,
        reporter: Reporter,
    ) -> None:
        self._name, self._config, self._buffer = name, config, buffer
        self._servers, self._acks, self._reporter = servers, acks, reporter
        self._slots = config.learner.teacher.score_slots
        self._threads = DaemonThreads()
        """One for each slot, and one that looks at the servers. A hung server's keep no process alive."""
        self._work: list[_Work] = []
        self._looking: Future[None] | None = None
        self._returned: list[tuple[int, int]] = []
        self._stop = threading.Event()
        self._sent = float("-inf")
        self.groups = 0
        """Whose scores were stored."""
        self._tokens, self._seconds = 0, 0.0

    def stop(self) -> None:
        """From a signal handler: the loop ends after its current turn."""
        self._stop.set()

    def run(self) -> None:
        """Returns after `stop`. Raises what ends the run: TeacherUnusable, ConfigError, a refusal of the buffer."""
        self._ask(lambda: self._buffer.hello("scorer"))
        while not self._stop.is_set():
            self._look_at_servers()
            self._put_what_is_done()
            self._take_groups()
            self._report()
        self._leave()

    def _look_at_servers(self) -> None:
        """In a thread, since a server may take its time."""
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
        made = self._acks.announced(found)
        outcome = self._ask(lambda: self._buffer.scored(made))
        if outcome == "late":
            log.info("the scores of group %d came too late", lease.group)
            return
        self._acks.write(made)
        self.groups += 1
        self._tokens += sum(len(each) for each in scores)
        self._seconds += time.monotonic() - work.began

    def _take_groups(self) -> None:
        silent = self._servers.silence
        credits = 0 if silent else self._slots - len(self._work)
        returned, self._returned = self._returned, []
        held = [work.key for work in self._work if not work.revoked]
        # With work or a silent server there is something to look at again soon.
        reply = self._ask(
            lambda: self._buffer.scoring(
                credits, held, POLL_S, returned=returned, silent=silent, logged=self._acks.head
            )
        )
        for work in self._work:
            work.revoked |= work.key in reply.revoked
        trajectories = iter(reply.trajectories)
        for lease in reply.groups:
            own = [next(trajectories) for _ in lease.digests]
            future = self._threads.submit(self._servers.score, own)
            self._work.append(_Work(lease, future, time.monotonic()))
        self._tell(reply, silent)

    def _tell(self, reply: ScoringReply, silent: str) -> None:
        if silent:
            self._reporter.waiting("teacher", silent[:500])
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
        """Gives the groups in work back; without an answer within the client's deadline their leases lapse."""
        held = [work.key for work in self._work] + self._returned
        try:
            self._buffer.scoring(0, [], 0.0, returned=held, silent="the scorer ends", logged=self._acks.head)
        except RunError as error:
            log.info("the groups in work were not given back, their leases lapse: %s", error)

    def _ask(self, request: Callable[[], T]) -> T:
        """The buffer's answer, after an outage too."""

        def again() -> bool:
            self._reporter.waiting("buffer", "buffer")
            return not self._stop.is_set()

        return through_outages(request, self._config.launch.restart_window_s, again)
