"""The policy's turns of one episode: first those that were recorded, then the engine's.

    turn k, recorded whole ────> given, if it was sampled behind the same ids
    turn k, recorded in part ──> the engine samples the rest behind it ─┐
    turn k, not recorded ──────> the engine samples it ─────────────────┴──> recorded, before the environment steps

Without durability the engine samples every turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.actors.engines.protocol import Engine, Generation, Sampling
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import EpisodeLimits
from asyncrl.actors.episodes.recorded.recording import PlaysOtherwise, Recording
from asyncrl.actors.episodes.resumption import Interrupted, continues, resumed
from asyncrl.actors.episodes.rows import OpenRow
from asyncrl.trajectory import Ticket, TurnRecord
from asyncrl.trajectory.turns import RecordedSample, ids_digest


@dataclass(frozen=True, slots=True)
class SampledTurn:
    generation: Generation
    cost: TurnRecord
    """The environment's time is filled in after its step."""


class Samples:
    def __init__(
        self,
        ticket: Ticket,
        engine: Engine,
        limits: EpisodeLimits,
        stop_token_ids: tuple[int, ...],
        recording: Recording,
    ) -> None:
        self._ticket, self._engine, self._limits = ticket, engine, limits
        self._stop_token_ids, self._recording, self._progress = stop_token_ids, recording, recording.progress

    async def next(self, row: OpenRow, number: int, *, summary: bool = False) -> SampledTurn:
        """Turn `number`, behind the ids of `row`. Raises PromptTooLong, EpisodeFailed, Interrupted, PlaysOtherwise, and
        what the engine raises."""
        digest = ids_digest(row.ids) if self._recording.durable else ""
        recorded = self._recorded(number, digest, summary)
        if recorded is not None and not recorded.partial:
            return self._given(recorded)
        progress, request = self._progress, f"{self._ticket.id}-{self._ticket.attempt}/{number}"
        if progress.interrupted and self._recording.goes_on:
            # The turn before this one ended while the actor was leaving.
            progress.handed_over = self._recording.recorded
            await self._recording.sent()
            raise Interrupted
        continued = self._recording.durable and (number == 0 or self._recording.goes_on)
        progress.interruptible = request if continued else ""
        try:
            turn, stored = await self._sampled(request, row, number, recorded), False
            if self._is_kept(turn.generation, continued=continued):
                stored = await self._recording.add(_record_of(turn, number, digest, summary=summary))
            if stored:
                progress.kept_tokens = progress.tokens + len(turn.generation.token_ids)
        finally:
            progress.interruptible = ""
        if turn.generation.stop_reason != "abort":
            return turn
        if not (progress.interrupted and continued):
            raise EpisodeFailed("aborted", f"{self._ticket.id} in turn {number}")
        progress.handed_over = stored
        raise Interrupted

    def _recorded(self, number: int, digest: str, summary: bool) -> RecordedSample | None:
        """What was sampled in the turn before, if anything. Raises PlaysOtherwise if the prompt is another one now."""
        recorded = self._recording.samples.get(number)
        if recorded is not None and (recorded.prompt, recorded.summary) != (digest, summary):
            raise PlaysOtherwise(f"turn {number} was sampled behind another prompt")
        return recorded

    def _is_kept(self, generation: Generation, *, continued: bool) -> bool:
        """Whether a sample is recorded. `continued`: whether another actor could continue a part of it."""
        if generation.stop_reason == "abort":
            return self._progress.interrupted and continued and bool(len(generation.token_ids))
        return self._recording.recorded

    def _given(self, recorded: RecordedSample) -> SampledTurn:
        tokens = len(recorded.token_ids)
        if why := misfit(recorded, self._limits.sampling(self._ticket, recorded.number, self._stop_token_ids)):
            raise PlaysOtherwise(why)
        self._progress.given = True
        self._progress.kept_tokens += tokens
        self._progress.enter("environment")
        prefilled = recorded.prefilled or 0
        cost = TurnRecord(recorded.queue_s, recorded.generate_s, None, prefilled, tokens)
        return SampledTurn(generation_of(recorded), cost)

    async def _sampled(self, request: str, row: OpenRow, number: int, recorded: RecordedSample | None) -> SampledTurn:
        """A turn of the engine, behind what `recorded` holds of it."""
        ticket, progress = self._ticket, self._progress
        sampling = self._limits.sampling(ticket, number, self._stop_token_ids)
        begun = None if recorded is None else generation_of(recorded)
        if begun is not None and not continues(begun, sampling):
            raise PlaysOtherwise(f"turn {number} cannot be continued under the limits of now")
        progress.enter("generate")
        began = progress.at
        try:
            generation = await resumed(self._engine, request, row.ids, sampling, begun)
        finally:
            progress.enter("environment")
        progress.given = False
        before = 0 if begun is None else len(begun.token_ids)
        prefilled = row.behind + before if generation.prefilled is None else generation.prefilled
        # The record is of the whole turn.
        seconds = progress.at - began + (0.0 if recorded is None else recorded.generate_s)
        cost = TurnRecord(generation.queue_s, seconds, None, prefilled, len(generation.token_ids))
        return SampledTurn(generation, cost)


def misfit(recorded: RecordedSample, sampling: Sampling) -> str:
    """Why a whole recorded turn cannot be given where `sampling` is wanted; empty: it can."""
    if len(recorded.token_ids) and (recorded.kept is None) != (sampling.max_kept == 0):
        return f"turn {recorded.number} was sampled under other actors.top_p, top_k or min_p"
    if recorded.kept is not None and recorded.kept.counts.max(initial=0) > sampling.max_kept:
        return f"turn {recorded.number} was sampled under a larger actors.max_kept"
    return ""


def generation_of(recorded: RecordedSample) -> Generation:
    return Generation(
        recorded.token_ids, recorded.logprobs, recorded.versions, recorded.stop_reason, recorded.queue_s,
        recorded.prefilled, recorded.kept,
    )  # fmt: skip


def _record_of(turn: SampledTurn, number: int, prompt: str, *, summary: bool) -> RecordedSample:
    made, cost = turn.generation, turn.cost
    return RecordedSample(
        number, made.token_ids, made.logprobs, made.versions, made.stop_reason, prompt, made.kept, cost.queue,
        cost.generate, cost.prefilled, summary,
    )  # fmt: skip
