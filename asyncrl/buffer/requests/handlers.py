"""The one table of requests: for each, its check, its answer, and whether it may wait for it.

A check and an answer raise Refused for a request that cannot be met, and WireError for one that is malformed beyond
what its structure in client/messages.py says. In reading order a trajectory that is put goes through `on_put` here,
`Buffer.accept` (core.py), `Tickets.receive` (tickets/tickets.py) and `Ledger.record_trajectory` (ledger/ledger.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from asyncrl.buffer.client import codec, messages
from asyncrl.buffer.client.messages import Head, PutOutcome, Refusal, Request
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.storage.payloads import PayloadLost
from asyncrl.buffer.record import from_record
from asyncrl.buffer.requests.answer import Answer as Answer
from asyncrl.buffer.requests.readers import Readers
from asyncrl.buffer.requests.scoring import ScoringRequests
from asyncrl.buffer.requests.turns import record_turn
from asyncrl.buffer.rules import Refused
from asyncrl.user_errors import Cause
from asyncrl.wire import Frame, WireError

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Request[Any])

MAX_WAIT_S = 60.0
"""How long a request for tickets or a batch may be held, whatever it asks for."""


@dataclass(frozen=True, slots=True)
class Handler(Generic[R]):
    """How one kind of request is checked, answered and held."""

    answer: Callable[[R, Sequence[Frame], bool], Answer | None]
    """Takes the request, its frames, and whether it must be answered now; returns None to let it wait."""
    check: Callable[[R], None] = lambda request: None
    """Runs once, when the request comes."""
    may_wait: Callable[[R], float] | None = None
    """Seconds for which the request may be held; None: it is always answered at once."""
    alike: Callable[[R], Hashable] = id
    """Requests that are alike wait in one line: while the first finds no answer, the others are not tried."""
    retry_s: float = 0.05
    """How often a held request is tried again."""
    urgent: bool = True
    """Commits at once, without waiting for the commit interval."""
    once: bool = False
    """A repeat gets the recorded reply, since answering it again would have another effect."""


class Requests:
    """The handlers of one buffer."""

    def __init__(
        self, buffer: Buffer, counts: Counter[str], clock: Callable[[], float], checkpoints: Path | None
    ) -> None:
        """`checkpoints`: the only folder under which clients may request checkpoints; None: nowhere."""
        self._checkpoints = checkpoints.resolve() if checkpoints is not None else None
        self._buffer = buffer
        self._counts = counts
        self._clock = clock
        self._readers = Readers(buffer.database, clock)
        scoring = ScoringRequests(buffer, counts, clock)
        self.handlers: Mapping[type[Request[Any]], Handler[Any]] = {
            messages.HelloRequest: Handler(self.on_hello),
            messages.TicketsRequest: Handler(
                self.on_tickets,
                check=self._renew,
                may_wait=_wait_s,
                alike=lambda request: self._buffer.prospect(self._clock(), request.actor, request.held),
                urgent=False,
                once=True,
            ),
            messages.RenewRequest: Handler(self.on_renew, urgent=False),
            messages.PutRequest: Handler(self.on_put, urgent=False),
            messages.TurnRequest: Handler(self.on_turn, urgent=False),
            messages.FailRequest: Handler(self.on_fail),
            messages.ReleaseRequest: Handler(self.on_release),
            messages.ScoringRequest: Handler(
                scoring.on_scoring,
                check=scoring.renew,
                may_wait=_wait_s,
                alike=lambda request: ("scoring", request.scorer),
                urgent=False,
                once=True,
            ),
            messages.ScoredRequest: Handler(scoring.on_scored, urgent=False),
            messages.StartRequest: Handler(self.on_start, once=True),
            messages.BatchRequest: Handler(
                self.on_batch, check=self._check_incarnation, may_wait=_wait_s, alike=_batch_of
            ),
            messages.FinishedRequest: Handler(self.on_finished),
            messages.PublishedRequest: Handler(self.on_published),
            messages.CheckpointedRequest: Handler(
                self.on_checkpointed,
                check=self._check_folder,
                may_wait=lambda _: float("inf"),
                alike=lambda request: (request.incarnation, request.batch, request.path),
                retry_s=0.005,
            ),
            messages.EvaluateRequest: Handler(self.on_evaluate),
            messages.EvaluationRequest: Handler(self.on_evaluation),
            messages.StatusRequest: Handler(self.on_status),
            messages.PageRequest: Handler(self.on_page, urgent=False),
            messages.RecordRequest: Handler(self.on_record, urgent=False),
            messages.CausedRequest: Handler(self.on_caused),
            messages.StopRequest: Handler(self.on_stop),
        }

    # Actors

    def on_hello(self, request: messages.HelloRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        if request.role == "actor":
            self._buffer.joined(request.who)
        elif request.role == "scorer":
            self._buffer.scoring.joined(request.who)
        log.info("%s joined as %s", request.who, request.role)
        history = self._buffer.ledger.history
        return Answer(Head(history.branch, history.version, history.published))

    def _renew(self, request: messages.TicketsRequest) -> None:
        self._buffer.renew(self._clock(), request.actor, request.leased)
        if request.logged is not None:
            self._buffer.logged(request.actor, request.logged)

    def on_tickets(self, request: messages.TicketsRequest, _: Sequence[Frame], at_once: bool) -> Answer | None:
        buffer, asked = self._buffer, (request.actor, request.held)
        tickets, why = buffer.issue(self._clock(), *asked, request.credits)
        hold, slots = buffer.hold(self._clock(), *asked), buffer.tickets.bound.slots
        waits = not buffer.stopping and hold in (None, request.held) and slots.left(request.actor) != 0
        if not tickets and not at_once and waits:
            return None
        return Answer(*codec.ticket_reply(tickets, why, hold, slots.number))

    def on_renew(self, request: messages.RenewRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        return Answer(self._buffer.renew(self._clock(), request.actor, request.leases))

    def on_put(self, request: messages.PutRequest, frames: Sequence[Frame], at_once: bool) -> Answer:
        if not frames:
            raise WireError(f"put carries 1 to {messages.MAX_PUTS} records, got none")
        return Answer([self._put_one(record) for record in frames])

    def _put_one(self, record: Frame) -> PutOutcome | Refusal:
        """A refused record does not affect the others in the same put."""
        try:
            trajectory = from_record(record)
            self._buffer.limits.check_rows(trajectory.rows, f"ticket {trajectory.id}")
            outcome = self._buffer.accept(trajectory, record)
        except WireError as error:
            self._counts["refused"] += 1
            log.warning("refused a record: %s", error)
            return Refusal("malformed", str(error))
        except Refused as error:
            log.warning("refused a trajectory: %s", error)
            return Refusal(error.code, str(error))
        self._counts["puts" if outcome == "stored" else outcome] += 1
        if outcome != "stored":
            self._counts[f"{outcome}_tokens"] += trajectory.num_policy_tokens
        return outcome

    def on_turn(self, request: messages.TurnRequest, frames: Sequence[Frame], at_once: bool) -> Answer:
        if not frames:
            raise WireError(f"turn carries 1 to {messages.MAX_PUTS} recorded turns, got none")
        return Answer([record_turn(self._buffer, request.actor, frame, self._counts) for frame in frames])

    def on_fail(self, request: messages.FailRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        r = request
        cause = Cause(r.place, r.outage) if r.place else None
        self._buffer.fail(r.actor, r.id, r.attempt, r.reason, r.detail, cause)
        self._counts["env_failures"] += 1
        return Answer()

    def on_release(self, request: messages.ReleaseRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        self._buffer.release(request.actor, request.leases)
        return Answer()

    # The learner

    def on_start(self, request: messages.StartRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        r = request
        started = self._buffer.start(r.batch, r.version, r.branch, r.fresh, r.caused)
        log.info("learner incarnation %d at batch %d, version %d", started.incarnation, r.batch, r.version)
        return Answer(started)

    def _check_incarnation(self, request: messages.BatchRequest) -> None:
        self._buffer.batches.check(request.incarnation)

    def on_batch(self, request: messages.BatchRequest, _: Sequence[Frame], at_once: bool) -> Answer | None:
        buffer = self._buffer
        answer = buffer.batch(self._clock(), request.incarnation, request.b)
        if answer.state == "waiting" and not at_once and not buffer.stopping:
            return None
        try:
            share = buffer.share(answer, request.dp_rank, request.dp_size)
            scores = buffer.scores(answer, request.dp_rank, request.dp_size)
        except PayloadLost as error:
            raise Refused("payload_lost", str(error)) from error
        batch, history = answer.batch, buffer.ledger.history
        shown = buffer.demonstrations.of(answer.batch) if answer.state == "ready" else []
        reply = messages.BatchReply(
            state=answer.state,
            why=answer.why,
            trajectories=[],
            weights=tuple(weight for _, _, weight in share),
            digests=tuple(digest for _, digest, _ in share),
            groups=batch.groups if batch else (),
            replayed=tuple((one.group, one.weight) for one in batch.replay.drawn) if batch else (),
            version=batch.version if batch else history.version,
            branch=history.branch,
            mask_before=buffer.mask_before(batch) if batch else None,
            checkpoint=buffer.checkpoint_wanted,
            failed=answer.failed,
            bound=batch.bound if batch else 0,
            demonstrations=tuple(replace(each, chat=b"") for each in shown),
            score_digests=tuple(digest for _, digest in scores),
        )
        frames = [*(record for record, _, _ in share), *(each.chat for each in shown), *(each for each, _ in scores)]
        return Answer(reply, frames)

    def on_finished(self, request: messages.FinishedRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        about = request.incarnation, request.b, request.outcome, request.told
        return Answer(self._buffer.finished(*about, now=self._clock()))

    def on_published(self, request: messages.PublishedRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        return Answer(self._buffer.published(request.incarnation, request.branch, request.version, request.digest))

    def _check_folder(self, request: messages.CheckpointedRequest) -> None:
        """A message may name no folder but one of the run's checkpoints."""
        path = request.path
        if "\0" in path or self._checkpoints is None or self._checkpoints not in Path(path).resolve().parents:
            raise Refused("bad_checkpoint", f"{path[:200]!r} is no folder below {self._checkpoints}")

    def on_checkpointed(
        self, request: messages.CheckpointedRequest, _: Sequence[Frame], at_once: bool
    ) -> Answer | None:
        numbers = request.incarnation, request.version, request.batch
        written = self._buffer.checkpointed(self._clock(), *numbers, Path(request.path), wait=at_once)
        return Answer() if written else None

    def on_evaluate(self, request: messages.EvaluateRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        self._buffer.evaluate(request.version)
        return Answer()

    def on_evaluation(self, request: messages.EvaluationRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        return Answer(self._buffer.evaluation(everyone=request.everyone, lost=request.lost))

    # Any process

    def on_status(self, request: messages.StatusRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        return Answer(self._buffer.status() | {"service": dict(self._counts)})

    def on_page(self, request: messages.PageRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        return Answer(self._readers.page(request.group, request.batch))

    def on_record(self, request: messages.RecordRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        record = self._readers.record(request.group, request.index)
        return Answer(messages.RecordReply(None), [] if record is None else [record])

    def on_caused(self, request: messages.CausedRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        self._buffer.caused()
        return Answer()

    def on_stop(self, request: messages.StopRequest, _: Sequence[Frame], at_once: bool) -> Answer:
        self._buffer.stop()
        return Answer()


def _wait_s(request: messages.TicketsRequest | messages.BatchRequest | messages.ScoringRequest) -> float:
    return min(request.wait_s, MAX_WAIT_S)


def _batch_of(request: messages.BatchRequest) -> Hashable:
    return request.incarnation, request.b
