"""The teacher's servers: which of them answer, what they are asked, and the checks that they are one teacher.

Any thread may ask. A server that does not answer within `learner.teacher.server_s`, or with an error of its own, is
silent until it answers its probe again; what it says wrongly raises TeacherUnusable, which ends the run.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.scorer.dialects import Dialect, TeacherUnusable, Token, scores_of
from asyncrl.scorer.identity import TOLERANCE, Identity, Probe, of_run
from asyncrl.trajectory import Trajectory
from asyncrl.wire.teacher_scores import TrajectoryScores

log = logging.getLogger(__name__)

_UNLIMITED = httpx.Limits()
"""`learner.teacher.score_slots` bounds the connections."""
RETRY_S = 1.0
"""Between two probes of a server that is silent."""
MOST_BYTES = 16 << 20
"""Most bytes of an answer, beside what its words take."""
BYTES_A_WORD = 1024
"""Its id, its text, its rank and its logprob, as JSON."""


class TeacherSilent(Exception):
    """No server answers; says why."""


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
        self._server_s = server_s
        self._http = httpx.Client(timeout=server_s, trust_env=False, limits=_UNLIMITED)
        self.identity: Identity | None = None
        self.failures = 0
        """Requests that a server did not answer."""

    def close(self) -> None:
        self._http.close()

    @property
    def silence(self) -> str:
        """Why no server answers; empty: one does."""
        if any(not server.silent for server in self._servers):
            return ""
        return "; ".join(f"{server.url}: {server.silent}" for server in self._servers)

    def look(self, now: float) -> None:
        """Probes the silent servers whose time it is. Raises TeacherUnusable, ConfigError."""
        for server in self._servers:
            if server.silent and now >= server.retry_at:
                server.retry_at = now + RETRY_S
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
        """The server that gives it joins `gave`."""
        while True:
            server = self._least_busy()
            try:
                if server.context is not None and len(tokens) + self._dialect.spare > server.context:
                    raise TeacherUnusable(
                        f"a row has {len(tokens)} tokens, and the teacher at {server.url} reads at most "
                        f"{server.context - self._dialect.spare}: lower env.max_tokens, or serve it with a longer "
                        "context."
                    )
                said = self._said(server, tokens, self._k)
                if server not in gave:
                    gave.append(server)
                return scores_of(said, places, self._k, server.url, self._dialect.more_words)
            except TeacherSilent as error:
                self._failed(server, str(error))
            finally:
                with self._lock:
                    server.running -= 1

    def _least_busy(self) -> _Server:
        with self._lock:
            answering = [server for server in self._servers if not server.silent]
            if not answering:
                raise TeacherSilent(self.silence)
            server = min(answering, key=lambda server: server.running)
            server.running += 1
            return server

    def _failed(self, server: _Server, why: str) -> None:
        with self._lock:
            self.failures += 1
            server.silent, server.retry_at = why, time.monotonic() + RETRY_S
        log.warning("%s does not answer: %s", server.url, why)

    def _learn(self, server: _Server) -> None:
        """The model's name at the server, and its context."""
        reply = self._answer(server, self._dialect.about, None)
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
        reply = self._answer(server, path, body, MOST_BYTES + len(tokens) * (k + 2) * BYTES_A_WORD)
        try:
            said = self._dialect.read(reply, tokens, k)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise TeacherUnusable(
                f"{server.url}{path} answered in another form than expected ({type(error).__name__} {error}): "
                f"{str(reply)[:300]}. Check learner.teacher.dialect, and the release of the server "
                "(docs/how-to/distillation.md)."
            ) from error
        return said

    def _answer(self, server: _Server, path: str, body: Any, most: int = MOST_BYTES) -> Any:
        """`most`: bytes of the longest answer. Raises TeacherSilent for a server that may answer later,
        TeacherUnusable for one that refuses."""
        url = server.url + path
        try:
            status, content = self._fetched(url, body, most)
        except httpx.HTTPError as error:
            raise TeacherSilent(f"{type(error).__name__} {error}".strip()) from error
        text = content[:500].decode(errors="replace")
        if status == 404 and body is None and not server.model:
            raise TeacherUnusable(
                f"{url} answered 404: {text[:200]}. Name the URL of a vLLM or SGLang server in "
                "learner.teacher.servers, without a path."
            )
        if status >= 500 or status in (404, 408, 429):
            raise TeacherSilent(f"{path} answered {status}: {text[:200]}")
        if status != 200:
            raise TeacherUnusable(
                f"{url} refused a request: {status} {text}. If it is asked for too many "
                f"words: {self._dialect.more_words.format(k=self._k)}, or lower learner.teacher.k."
            )
        try:
            return json.loads(content)
        except ValueError as error:
            raise TeacherUnusable(
                f"{url} answered {text[:200]!r}, which is no JSON: name the URL of a vLLM or SGLang server in "
                "learner.teacher.servers."
            ) from error

    def _fetched(self, url: str, body: Any, most: int) -> tuple[int, bytes]:
        """(status, content). The client's own deadline is of each read: this one is of the whole answer."""
        until, content = time.monotonic() + self._server_s, bytearray()
        with self._http.stream("GET" if body is None else "POST", url, json=body) as response:
            for part in response.iter_bytes():
                content += part
                if len(content) > most:
                    raise TeacherUnusable(
                        f"{url} answered with more than {most} bytes, expected a few hundred for each word of each "
                        "token: name the URL of a vLLM or SGLang server in learner.teacher.servers."
                    )
                if time.monotonic() > until:
                    raise TeacherSilent(f"its answer was not whole after {self._server_s:g} s")
        return response.status_code, bytes(content)


def remembered(file: Path, path: str) -> Callable[[Probe], Identity]:
    """The run's teacher in `file` (`RunFolder.teacher`)."""
    return lambda found: of_run(file, path, found)
