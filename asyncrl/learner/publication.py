"""Makes policy versions available to the actors."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from torch import Tensor

from asyncrl.learner.backends.protocol import Backend
from asyncrl.learner.ranks import Order
from asyncrl.learner.session import Session
from asyncrl.weights.protocol import Publisher

log = logging.getLogger(__name__)


class Publication:
    """Publishes the versions of one session, each at most once."""

    def __init__(self, session: Session, backend: Backend, publisher: Publisher) -> None:
        self._session, self._backend, self._publisher = session, backend, publisher
        self.published = -1
        """The newest version published on the session's branch; -1: none"""

    def change_branch(self, branch: int) -> None:
        """History forked: what was published on the old branch no longer counts."""
        session = self._session
        log.warning("a new branch, %d, begins at version %d", branch, session.version)
        session.reporter.event("branch", step=session.version, branch=branch)
        session.branch, self.published = branch, -1
        self.publish()

    def ensure(self) -> None:
        """Publishes if nothing was published on this branch yet, or if the memory that held it is gone."""
        latest = self._publisher.latest()
        if self.published < 0 or latest is None or latest.order < (self._session.branch, self.published):
            self.publish()

    def publish(self) -> None:
        """Publishes the current version, unless the actors can have it, or a newer one, already."""
        session, latest = self._session, self._publisher.latest()
        current = (session.branch, session.version)
        if self.published >= session.version and latest is not None and latest.order >= current:
            return
        session.reporter.waiting("publish")
        begun = time.perf_counter()
        sizes: list[int] = []
        session.ranks.order(Order("publish"))

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._backend.weights():
                sizes.append(tensor.nbytes)
                yield name, tensor

        sent = self._publisher.publish(session.branch, session.version, counted())
        seconds = time.perf_counter() - begun
        branch = session.ask(
            lambda: session.buffer.published(session.incarnation, sent.branch, sent.version, sent.digest)
        )
        if branch != sent.branch:  # redone steps gave other weights
            self.change_branch(branch)
            return
        self.published = max(self.published, session.version)
        session.reporter.waiting(None)
        session.reporter.metrics(
            {
                "weights/publish_s": seconds,
                "weights/bytes": sum(sizes),
                "weights/published_version": session.version,
            }
        )
        session.reporter.event("published", step=session.version, branch=session.branch, digest=sent.digest)
