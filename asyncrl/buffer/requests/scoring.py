"""The requests of scorers: complete groups out, their scores in (`asyncrl.buffer.scoring`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from asyncrl.buffer.client import messages
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.storage.payloads import PayloadLost
from asyncrl.buffer.requests.answer import Answer
from asyncrl.buffer.rules import Refused
from asyncrl.wire import Frame, WireError
from asyncrl.wire.teacher_scores import from_record

log = logging.getLogger(__name__)


class ScoringRequests:
    def __init__(self, buffer: Buffer, counts: Counter[str], clock: Callable[[], float]) -> None:
        self._buffer, self._counts, self._clock = buffer, counts, clock

    def renew(self, request: messages.ScoringRequest) -> None:
        r = request
        self._buffer.scoring.renew(self._clock(), r.scorer, r.leased, r.returned, r.silent)
        if r.logged is not None:
            self._buffer.scoring.logged(r.scorer, r.logged)

    def on_scoring(self, request: messages.ScoringRequest, _: Sequence[Frame], at_once: bool) -> Answer | None:
        buffer, now, r = self._buffer, self._clock(), request
        revoked = buffer.scoring.renew(now, r.scorer, r.leased, (), r.silent)
        reply = buffer.issue_groups(now, r.scorer, r.credits)
        if not reply.groups and not revoked and not at_once and not buffer.stopping:
            return None
        try:
            records = [record for lease in reply.groups for record in buffer.records_of(lease.group)]
        except PayloadLost as error:
            raise Refused("payload_lost", str(error)) from error
        return Answer(replace(reply, revoked=tuple(revoked)), records)

    def on_scored(self, request: messages.ScoredRequest, frames: Sequence[Frame], at_once: bool) -> Answer:
        if len(frames) != 1:
            raise WireError(f"scored carries the record of one group's scores, got {len(frames)} frames")
        scores = from_record(frames[0])
        try:
            outcome = self._buffer.accept_scores(scores, frames[0])
        except Refused as error:
            self._counts["refused"] += 1
            log.warning("refused the scores of %s: %s", scores.scorer, error)
            raise
        self._counts["scored" if outcome == "stored" else f"scores_{outcome}"] += 1
        return Answer(outcome)
