"""The blocking client, for any process: learner, launcher, tools.

Every call has a deadline and ends in its answer, `BufferTimeout` or `BufferRefused`. While the buffer restarts, calls
wait and are sent again: all of them may be repeated. One client per thread.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import zmq

from asyncrl.buffer.client import codec, messages, retry
from asyncrl.buffer.client.errors import TOO_LARGE, BufferRefused, BufferTimeout
from asyncrl.buffer.client.messages import (
    BatchReply,
    EvalReply,
    Head,
    PutOutcome,
    Request,
    ScoringReply,
    Start,
    TicketReply,
    TurnOutcome,
)
from asyncrl.buffer.client.pages import Page
from asyncrl.buffer.record import MAX_RECORD_BYTES, to_record, too_large
from asyncrl.sockets import Endpoint, Link
from asyncrl.trajectory import Lease, LogHead, TicketId, Trajectory
from asyncrl.trajectory.turns import Recorded
from asyncrl.user_errors import Cause
from asyncrl.wire import Frame
from asyncrl.wire.teacher_scores import GroupScores, bytes_at_most
from asyncrl.wire.teacher_scores import to_record as scores_to_record
from asyncrl.wire.turns import encode_turn

T = TypeVar("T")


def scores_too_large(scores: GroupScores) -> str:
    """Why the buffer cannot take the record of these scores, and the remedy; empty: it can."""
    if (size := bytes_at_most(scores)) <= MAX_RECORD_BYTES:
        return ""
    return (
        f"the scores of group {scores.group} have up to {size} bytes, expected at most {MAX_RECORD_BYTES}: lower "
        "learner.teacher.k, learner.group_size or env.max_tokens."
    )


class BlockingBuffer(ABC):
    """Every request to the buffer as a blocking method."""

    def __init__(self, identity: str) -> None:
        """`identity` names the process in the buffer's log and status; an actor's own name if it plays tickets."""
        self.identity = identity

    @abstractmethod
    def ask(self, request: Request[T], frames: Sequence[Frame] = ()) -> T:
        """The answer to one request."""

    def hello(self, role: str) -> Head:
        """A new process begins. Tickets that an earlier actor of this name held are issued again."""
        return self.ask(messages.HelloRequest(role, self.identity))

    def tickets(
        self,
        actor: str,
        held: tuple[int, int],
        credits: int,
        leased: Sequence[Lease],
        wait_s: float,
        logged: LogHead | None = None,
    ) -> TicketReply:
        """At most `credits` tickets for an actor that holds weights (branch, version), after at most `wait_s`.
        The leases in `leased` are renewed. `logged`: how far the actor's log is."""
        return self.ask(messages.TicketsRequest(actor, held, credits, leased, wait_s, logged))

    def renew(self, actor: str, leases: Sequence[Lease]) -> list[Lease]:
        """Renews leases for a full term. Returns those that were revoked: abort these episodes."""
        return self.ask(messages.RenewRequest(actor, leases))

    def put(self, trajectory: Trajectory) -> PutOutcome:
        """Returns when the trajectory is durable. late: another attempt came first; this one is counted and
        discarded."""
        record = to_record(trajectory)
        if why := too_large(trajectory, record):
            raise BufferRefused("put", TOO_LARGE, why)
        (outcome,) = self.ask(messages.PutRequest(), [record])
        if isinstance(outcome, messages.Refusal):
            raise BufferRefused("put", outcome.code, outcome.message)
        return outcome

    def turn(self, id: TicketId, attempt: int, record: Recorded) -> TurnOutcome:
        """Returns when the recorded turn is durable, or revoked: another attempt may have the ticket by now, so that
        the environment must not be stepped. Raises Unrecordable."""
        (outcome,) = self.ask(messages.TurnRequest(self.identity), [encode_turn(id, attempt, record)])
        if isinstance(outcome, messages.Refusal):
            raise BufferRefused("turn", outcome.code, outcome.message)
        return outcome

    def fail(self, id: TicketId, attempt: int, reason: str, detail: str, cause: Cause | None = None) -> None:
        """The episode of a ticket of this client's actor cannot be finished; it is tried again within `env.retries`."""
        self.ask(messages.FailRequest.of(self.identity, id, attempt, reason, detail, cause))

    def release(self, actor: str, leases: Sequence[Lease]) -> None:
        """Gives tickets back."""
        self.ask(messages.ReleaseRequest(actor, leases))

    def scoring(
        self,
        credits: int,
        leased: Sequence[tuple[int, int]],
        wait_s: float,
        *,
        returned: Sequence[tuple[int, int]] = (),
        silent: str = "",
        logged: LogHead | None = None,
    ) -> ScoringReply:
        """At most `credits` complete groups for this client's scorer, after at most `wait_s`. The leases in `leased`,
        (group, attempt), are renewed, those in `returned` end. `silent`: why the teacher does not answer."""
        request = messages.ScoringRequest(self.identity, credits, leased, returned, silent[:4000], wait_s, logged)
        return self.ask(request)

    def scored(self, scores: GroupScores) -> PutOutcome:
        """Returns when the scores are durable. late: others came first, or the group needs none any more."""
        if why := scores_too_large(scores):
            raise BufferRefused("scored", TOO_LARGE, why)
        return self.ask(messages.ScoredRequest(), [scores_to_record(scores)])

    def start(
        self, resume_batch: int, version: int, branch: int | None, fresh: bool = False, caused: bool = False
    ) -> Start:
        """A new incarnation of the learner, with weights (branch, version), that wants `resume_batch` next.

        branch: None for the initial weights. fresh: batches recorded from there on are not redone. caused: the last
        incarnation was ended on purpose, so the batch that it held is not suspected.
        """
        return self.ask(messages.StartRequest(resume_batch, version, branch, fresh, caused))

    def batch(self, incarnation: int, b: int, dp_rank: int, dp_size: int, wait_s: float) -> BatchReply:
        """This rank's share of batch b, after at most `wait_s`. The same answer however often it is asked."""
        return self.ask(messages.BatchRequest(incarnation, b, dp_rank, dp_size, wait_s))

    def finished(
        self, incarnation: int, b: int, outcome: Literal["applied", "guard"], told: messages.Told | None = None
    ) -> int:
        """Called once per batch, by rank 0, before the new weights are published. Returns the version after it. `told`:
        what was measured of the batch; only the first call for it counts."""
        return self.ask(messages.FinishedRequest(incarnation, b, outcome, told))

    def published(self, incarnation: int, branch: int, version: int, digest: str) -> int:
        """Actors can have these weights now. Returns the branch: a new one if the version had another digest before,
        and these weights are then to be published on it."""
        return self.ask(messages.PublishedRequest(incarnation, branch, version, digest))

    def checkpointed(self, incarnation: int, version: int, batch: int, path: str) -> None:
        """The learner's part lies in the folder `path`, `batch` is the one it wants next; adds `path`/buffer."""
        self.ask(messages.CheckpointedRequest(incarnation, version, batch, path))

    def evaluate(self, version: tuple[int, int]) -> None:
        """Opens the held-out sets, pinned to (branch, version), for every actor. Does so once for each version."""
        self.ask(messages.EvaluateRequest(version))

    def evaluation(self, *, everyone: bool = False, lost: tuple[int, int] | None = None) -> EvalReply:
        """Where the latest evaluation stands. `everyone`: all actors play what is open. `lost`: these weights are gone,
        and what is pinned to them starts again at the newest."""
        return self.ask(messages.EvaluationRequest(everyone, lost))

    def status(self) -> dict[str, Any]:
        """Counts by state and reason, staleness histograms, leases per actor, disk bytes, counts of the service."""
        return self.ask(messages.StatusRequest())

    def page(self, group: int, batch: int) -> Page:
        """Committed rows for a reader: groups from this number on, and the batches from this serial on. Raises
        BufferRefused, with the code `busy` when readers ask for too much."""
        return self.ask(messages.PageRequest(group, batch))

    def record(self, group: int, index: int) -> Trajectory | None:
        """One stored trajectory, for a reader; None: its payload is not kept. Raises as `page` does."""
        return self.ask(messages.RecordRequest(group, index)).trajectory

    def caused(self) -> None:
        """Called before the running learner is killed on purpose: the batch that it holds is not suspected."""
        self.ask(messages.CausedRequest())

    def stop(self) -> None:
        """No further tickets; the buffer process ends after this answer."""
        self.ask(messages.StopRequest())


class BufferClient(BlockingBuffer):
    """Asks the buffer process over a socket."""

    def __init__(self, address: Endpoint | str, *, identity: str, deadline_s: float = 30.0) -> None:
        super().__init__(identity)
        self.address = address
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._link: Link[zmq.Socket[bytes]] = Link(zmq.Context.instance(), zmq.DEALER, address, identity=identity)
        self._socket = self._link.socket

    def close(self) -> None:
        self._link.close()

    def ask(self, request: Request[T], frames: Sequence[Frame] = ()) -> T:
        n = next(self._numbers)
        message = [codec.encode_request(request, n), *frames]
        schedule = retry.Schedule(retry.RESEND_S, self._deadline_s + getattr(request, "wait_s", 0.0))
        while (wait_s := schedule.next_wait()) is not None:
            reply = self._exchange(message, n, time.monotonic() + wait_s)
            if reply is not None:
                return codec.decode_reply(request, *reply)
            self._link.follow()
        raise BufferTimeout.after(schedule.elapsed_s, request.op, self.address)

    def _exchange(
        self, message: Sequence[Frame], n: int, until: float
    ) -> tuple[messages.ReplyHeader, Sequence[Frame]] | None:
        """Sends the request; returns the header and frames of its reply, or None if there is none in time."""
        if self._poll(until, zmq.POLLOUT):
            self._socket.send_multipart(message, zmq.NOBLOCK, copy=False)
        while self._poll(until, zmq.POLLIN):
            first, *frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
            header = codec.decode_header(first)
            if header.n == n:
                return header, frames
        return None

    def _poll(self, until: float, event: int) -> bool:
        left = until - time.monotonic()
        return left > 0 and bool(self._socket.poll(int(left * 1000) + 1, event))
