"""The policy's replies to an agent whose turns are durable: first those that were recorded, then the engine's.

    the k-th request of a digest ──k-th recorded──> given; nothing is sampled
                                 ──not recorded───> the engine samples it ──> recorded, before the agent has it

An agent that declares `replayable` is called again from its start on the next actor. The digest is of the prompt's ids
and of what the request asks for. A request that was not recorded, while recorded replies are left, is a difference,
unless the recording shows requests that ran in parallel, whose order may be another one now; then it is one if replies
are left when the agent has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from asyncrl.actors.endpoint.replies import TurnCost
from asyncrl.actors.endpoint.requests import RequestedSampling
from asyncrl.actors.engines.protocol import Generation, Sampling
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Keep, Progress
from asyncrl.actors.episodes.recorded.samples import generation_of, misfit
from asyncrl.trajectory import Ticket
from asyncrl.trajectory.turns import DIVERGED, MAX_RECORDS, RecordedReset, RecordedSample
from asyncrl.user_errors import Cause
from asyncrl.wire.turns import tools_digest

log = logging.getLogger(__name__)


class RecordedReplies:
    """The recorded replies of one episode, and what is recorded of it."""

    def __init__(self, ticket: Ticket, progress: Progress, sampling: Sampling, *, replayable: bool) -> None:
        """`sampling`: of this run, which decides whether what is carried can be given."""
        self._progress, self._keep = progress, progress.keep if replayable else None
        self._given: defaultdict[str, deque[RecordedSample]] = defaultdict(deque)
        self.left = 0
        """Recorded replies that the agent has not asked for yet."""
        self._parallel, self._begins_again, self._next = False, False, 0
        self._adding = asyncio.Lock()
        if self._keep is not None:
            self._carry([record for record in ticket.turns if isinstance(record, RecordedSample)], sampling)

    def _carry(self, samples: Sequence[RecordedSample], sampling: Sampling) -> None:
        """Take over what came with the ticket, or begin again where it cannot be given."""
        if why := next(filter(None, (misfit(sample, sampling) for sample in samples)), ""):
            log.warning("an episode begins again: %s", why)
            self._progress.begun_again += 1
            self._begins_again = True
            return
        for sample in samples:
            self._given[sample.prompt].append(sample)
        self.left = self._next = len(samples)
        self._parallel = any(sample.beside for sample in samples)

    def given(self, digest: str) -> tuple[int, TurnCost] | None:
        """The number of a recorded reply and the reply; None: it is to be sampled. Raises EpisodeFailed, if the agent
        asks for something else than it had asked for."""
        waiting = self._given.get(digest)
        if not waiting:
            if self.left and not self._parallel:
                raise self._diverged("it sent a request that it had not sent")
            return None
        sample = waiting.popleft()
        self.left -= 1
        tokens = len(sample.token_ids)
        self._progress.stepped_again()
        self._progress.sampled(tokens)
        self._progress.kept_tokens += tokens
        return sample.number, TurnCost(generation_of(sample), sample.generate_s)

    async def add(self, digest: str, costs: Sequence[TurnCost], kept: Sequence[Generation], beside: int) -> int:
        """Returns the number of a new reply when it is stored; without one that of what is not recorded. Raises
        EpisodeFailed. `kept`: what the agent gets of each choice. `beside`: requests that run beside this one."""
        async with self._adding:  # replies are numbered, and sent, in the order in which they are added
            if len(costs) != 1:
                self._keep = None  # what comes behind it could not be given without it
            if self._keep is None:
                return MAX_RECORDS
            (cost,), (made,), number = costs, kept, self._next
            record = RecordedSample(
                number, made.token_ids, made.logprobs, made.versions, made.stop_reason, digest, made.kept,
                cost.generation.queue_s, cost.seconds, cost.generation.prefilled, summary=True, beside=beside,
            )  # fmt: skip
            if not await self._stored(self._keep, record):
                self._keep = None  # the buffer has no room
                return MAX_RECORDS
            self._next += 1
            self._progress.kept_tokens += len(made.token_ids)
            return number

    async def _stored(self, keep: Keep, record: RecordedSample) -> bool:
        """Whether the record is stored; behind a reset, if the episode begins again."""
        if self._begins_again:
            if not await keep(RecordedReset((), tools_digest(()))):
                return False
            self._begins_again = False
        return await keep(record)

    def check_all_given(self) -> None:
        """Raises EpisodeFailed if the agent has ended without all that it had asked for."""
        if self.left:
            raise self._diverged(f"it ended without {self.left} of its requests")

    @staticmethod
    def _diverged(what: str) -> EpisodeFailed:
        detail = f"the agent was called again, and {what}: it is not replayable"
        return EpisodeFailed(DIVERGED, detail, Cause("agent: diverged"))


def request_digest(prompt: Sequence[int], asked: RequestedSampling) -> str:
    """32 hex digits over the ids of a prompt and what a request asks for beside it."""
    about = json.dumps(dataclasses.astuple(asked)).encode()
    return hashlib.blake2b(np.asarray(prompt, np.int32).tobytes() + about, digest_size=16).hexdigest()
