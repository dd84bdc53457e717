"""The teacher's servers: which of them answer, what they are asked, and the checks that they are one teacher.

Any thread may ask. A server that does not answer within `learner.teacher.server_s`, or to its probe with an error of
its own, is silent until it answers that again. What it says wrongly raises TeacherUnusable, which ends the run, and so
does a row at which servers err each time while they answer their probes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.scorer.dialects import Dialect, TeacherUnusable, Token, scores_of
from asyncrl.scorer.identity import TOLERANCE, Identity, Probe, of_run
from asyncrl.scorer.requests import MOST_BYTES, Requests, ServerErred, TeacherSilent
from asyncrl.trajectory import Trajectory
from asyncrl.wire.teacher_scores import TrajectoryScores

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two probes of a server that is silent."""
BYTES_A_WORD = 1024
"""Its id, its text, its rank and its logprob, as JSON."""
AGAIN_S = (1.0, 4.0, 15.0, 40.0)
"""Before a row is asked for again, each time that a server which answers its probe erred at it. Behind these it is the
row: a minute is for a server that has too much to do, or too little memory, for a while."""


@dataclass(slots=True, eq=False)
class _Server:
    url: str
    model: str = ""
    context: int | None = None
    running: int = 0
    silent: str = "it was not asked yet"
    """Why it is not asked now; empty: it answers."""
    retry_at: float = 0.0


class TeacherServers:
    def __init__(
        self,
        urls: Sequence[str],
        dialect: Dialect,
        *,
        k: int,
        server_s: float,
        longest: int,
        probe: Sequence[int],
        remember: Callable[[Probe], Identity],
    ) -> None:
        """
        Args:
            k: words of each token; 0: the sampled one alone.
            longest: tokens of the longest row (`env.max_tokens`).
            probe: tokens by which the teacher is known again.
            remember: gives the run's teacher, which the first probe may decide.
        """
        self._servers = [_Server(url.rstrip("/")) for url in urls]
        self._dialect, self._k, self._longest = dialect, k, longest
        self._probe, self._remember = tuple(probe), remember
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._requests = Requests(server_s)
        self.identity: Identity | None = None
        self.failures = 0
        """Requests that a server did not answer."""

    def close(self) -> None:
        self._closed.set()
        self._requests.close()

    @property
    def silence(self) -> str:
        """Why no server answers; empty: one does."""
        if any(not server.silent for server in self._servers):
            return ""
        now = time.monotonic()
        whys = [(f"{each.url}: {each.silent}", self._requests.unanswered(now, each.url)) for each in self._servers]
        return "; ".join(text for why in whys for text in why if text)

    @property
    def unanswered(self) -> str:
        """Which server has been asked for longest, and for how long; empty: not for long."""
        return self._requests.unanswered(time.monotonic())

    def look(self, now: float) -> None:
        """Probes the silent servers whose time it is, and has those name their model that have not answered for long.
        Raises TeacherUnusable, ConfigError."""
        for server in self._servers:
            if now < server.retry_at:
                continue
            server.retry_at = now + RETRY_S
            if server.silent:
                self._look_at(server)
            elif slow := self._requests.unanswered(now, server.url):
                try:
                    self._requests.get(server.url + self._dialect.about, known=True)
                except TeacherSilent as error:
                    self._failed(server, f"{slow}; it does not name its model either: {error}")

    def _look_at(self, server: _Server) -> None:
        try:
            self._learn(server)
            self._verify(server)
        except TeacherSilent as error:
            server.silent = str(error)
        else:
            log.info("%s serves the teacher %s", server.url, server.model)
            server.silent = ""

    def score(self, trajectories: Sequence[Trajectory]) -> tuple[TrajectoryScores, ...]:
        """Scores of all sampled tokens of a group's trajectories. Every server that gave some is probed behind it: it
        may have been started again with another model in between. Raises TeacherSilent, TeacherUnusable."""
        gave: list[_Server] = []
        scores = tuple(self._trajectory(each, gave) for each in trajectories)
        for server in gave:
            try:
                self._verify(server, thorough=False)
            except TeacherSilent as error:
                self._failed(server, str(error))
                raise
        return scores

    def _trajectory(self, trajectory: Trajectory, gave: list[_Server]) -> TrajectoryScores:
        parts = [self._row(row.token_ids.tolist(), np.flatnonzero(row.mask).tolist(), gave) for row in trajectory.rows]
        return TrajectoryScores(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.sampled for part in parts]),
        )

    def _row(self, tokens: list[int], places: list[int], gave: list[_Server]) -> TrajectoryScores:
        """The server that gives it joins `gave`. An error at this row alone leaves its server to the other rows."""
        erred: list[_Server] = []
        while True:
            server = self._least_busy(erred)
            try:
                scores = self._row_of(server, tokens, places)
            except TeacherSilent as error:
                why = error
            else:
                if server not in gave:
                    gave.append(server)
                return scores
            finally:
                with self._lock:
                    server.running -= 1
            if isinstance(why, ServerErred) and self._answers(server):
                erred.append(server)
                self._wait_for(server, len(tokens), len(erred), why)
            else:
                self._failed(server, str(why))

    def _row_of(self, server: _Server, tokens: list[int], places: list[int]) -> TrajectoryScores:
        if server.context is not None and len(tokens) + self._dialect.spare > server.context:
            raise TeacherUnusable(
                f"a row has {len(tokens)} tokens, and the teacher at {server.url} reads at most "
                f"{server.context - self._dialect.spare}: lower env.max_tokens, or serve it with a longer context."
            )
        return scores_of(self._said(server, tokens, self._k), places, self._k, server.url, self._dialect.more_words)

    def _answers(self, server: _Server) -> bool:
        """Whether it answers its probe now."""
        try:
            self._verify(server, thorough=False)
        except TeacherSilent:
            return False
        return True

    def _wait_for(self, server: _Server, length: int, times: int, why: ServerErred) -> None:
        """Until the row may be asked for again. Raises TeacherUnusable after the last time."""
        with self._lock:
            self.failures += 1
        log.warning("%s errs at a row of %d tokens, and answers its probe: %s", server.url, length, why)
        if times > len(AGAIN_S):
            raise TeacherUnusable(
                f"{server.url} erred at a row of {length} tokens, as the teacher's servers did {times} times within "
                f"{sum(AGAIN_S):g} s, each of which answered its probe then: {why}. Its log says why; correct it, or "
                "lower env.max_tokens if rows of this length are at fault, and continue with --resume."
            )
        self._closed.wait(AGAIN_S[times - 1])

    def _least_busy(self, erred: Sequence[_Server] = ()) -> _Server:
        """One that has erred least often at the row that is to be asked for."""
        with self._lock:
            answering = [server for server in self._servers if not server.silent]
            if not answering:
                raise TeacherSilent(self.silence)
            server = min(answering, key=lambda server: (erred.count(server), server.running))
            server.running += 1
            return server

    def _failed(self, server: _Server, why: str) -> None:
        with self._lock:
            self.failures += 1
            server.silent, server.retry_at = why, time.monotonic() + RETRY_S
        log.warning("%s does not answer: %s", server.url, why)

    def _learn(self, server: _Server) -> None:
        """The model's name at the server, and its context."""
        reply = self._requests.get(server.url + self._dialect.about, known=bool(server.model))
        try:
            first = (reply["data"] or [{}])[0]
            server.model, context = str(first.get("id", "")), first.get("max_model_len")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise TeacherUnusable(
                f"{server.url}{self._dialect.about} answered {str(reply)[:200]}, expected a list of models: name the "
                "URL of a vLLM or SGLang server in learner.teacher.servers."
            ) from error
        server.context = context if isinstance(context, int) else None
        if server.context is not None and self._longest + self._dialect.spare > server.context:
            raise ConfigError(
                f"env.max_tokens is {self._longest}, and the teacher at {server.url} (learner.teacher.servers) reads "
                f"rows of at most {server.context - self._dialect.spare} tokens: lower env.max_tokens, or serve "
                "it with a longer context."
            )

    def _verify(self, server: _Server, *, thorough: bool = True) -> None:
        """`thorough`: also that its words are over the whole vocabulary."""
        places = range(1, len(self._probe))
        about = (server.url, self._dialect.more_words)
        asked = scores_of(self._said(server, self._probe, self._k), places, self._k, *about)
        if thorough and self._k:
            one, more = (1, max(self._k, 2))
            first, wide = (scores_of(self._said(server, self._probe, k), places, k, *about) for k in (one, more))
            apart = float(np.abs(first.logprobs[:, 0] - wide.logprobs[:, 0]).mean())
            if apart > TOLERANCE:
                raise TeacherUnusable(
                    f"{server.url} gives the most likely word another logprob when it is asked for {one} word than for "
                    f"{more}, by {apart:.2f} nats: it renormalises over the words that it returns. Serve the teacher "
                    "so that logprobs are over the whole vocabulary (vLLM: --logprobs-mode raw_logprobs)."
                )
        logprobs = [float(x) for x in asked.sampled]
        if self.identity is None:
            self.identity = self._remember(Probe(self._probe, tuple(logprobs)))
        self.identity.check(logprobs, server.url)

    def _said(self, server: _Server, tokens: Sequence[int], k: int) -> list[Token]:
        path, body = self._dialect.request(tokens, k, server.model)
        most = MOST_BYTES + len(tokens) * (k + 2) * BYTES_A_WORD
        more = self._dialect.more_words.format(k=k)
        remedy = f"If it is asked for too many words: {more}, or lower learner.teacher.k"
        reply = self._requests.post(server.url + path, body, most, f"a row of {len(tokens)} tokens", remedy)
        try:
            said = self._dialect.read(reply, tokens, k)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise TeacherUnusable(
                f"{server.url}{path} answered in another form than expected ({type(error).__name__} {error}): "
                f"{str(reply)[:300]}. Check learner.teacher.dialect, and the release of the server "
                "(docs/how-to/distillation.md)."
            ) from error
        return said


def remembered(file: Path, path: str) -> Callable[[Probe], Identity]:
    """The run's teacher in `file` (`RunFolder.teacher`)."""
    return lambda found: of_run(file, path, found)
