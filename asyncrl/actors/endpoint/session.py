"""One episode at the endpoint: requests in, rows of sampled tokens out.

    request ──> prompt ids (conversations.py) ──> engine ──> reply ──received (delivery.py)──> rows (episodes/rows.py)

Only replies that the agent received are part of the episode; which ones is known for certain only at its end.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from bisect import bisect_left
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, TypeVar

from asyncrl.actors.endpoint.constraints import constraints
from asyncrl.actors.endpoint.conversations import Conversations
from asyncrl.actors.endpoint.deduplication import DistinctRequest, DistinctRequests
from asyncrl.actors.endpoint.delivery import WasRead
from asyncrl.actors.endpoint.recorded import RecordedReplies, request_digest
from asyncrl.actors.endpoint.replies import Choice, Reply, TurnCost, of_one_turn
from asyncrl.actors.endpoint.requests import BadRequest, ChatBody, RequestedSampling, TokenBody
from asyncrl.actors.engines.kept import generate
from asyncrl.actors.engines.protocol import Engine, EngineDied, Generation, PromptTooLong
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.actors.episodes.rendering import OffLoop
from asyncrl.actors.episodes.rows import BranchingRows
from asyncrl.actors.episodes.turn_rewards import Spans
from asyncrl.data.base import Message
from asyncrl.rendering.template import Renderer
from asyncrl.trajectory import StopReason, Ticket, TurnRecord

T = TypeVar("T")


class Session:
    """The requests of one episode, from the first to the end of its ticket."""

    def __init__(
        self,
        ticket: Ticket,
        engine: Engine,
        renderer: Renderer,
        limits: EpisodeLimits,
        progress: Progress,
        was_read: WasRead = lambda id: False,
        *,
        replayable: bool = False,
    ) -> None:
        """`was_read`: whether asyncrl's own client read a transmission; without one, every client is foreign.
        `replayable`: what the agent declares."""
        self.requests = DistinctRequests(was_read)
        self.limit: StopReason | None = None
        """The limit of the episode that a request exceeded."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the error that ends the episode (EpisodeFailed) or the actor (EngineDied)."""
        self.histories: dict[str, list[Message]] = {}
        """The conversations of this episode by the id of the reply that ends each."""
        self.renderer, self.limits, self.temperature = renderer, limits, ticket.temperature
        self._ticket, self._engine, self._progress = ticket, engine, progress
        self._conversations = Conversations(renderer)
        sampling = limits.sampling(ticket, 0, renderer.stop_token_ids)
        self.recorded = RecordedReplies(ticket, progress, sampling, replayable=replayable)
        self._given_breaks = 0
        """Those of prompts whose replies were recorded."""
        self._off_loop = OffLoop(renderer, limits)
        self._turns = self._sampled = self._running = self._recording = self._named = 0
        self._answered: list[tuple[DistinctRequest, Reply]] = []
        self._idle: tuple[float, TurnCost | None] = (0.0, None)
        """Since when no request runs, and the turn that ended then."""

    async def chat(self, body: ChatBody) -> Reply:
        """Raises BadRequest, and what the engine raises."""
        again = self.recorded.left > 0  # the actor that sampled the reply has counted it
        self._progress.ignored_constraints += bool(constraints(body)) and not again
        said = (body.messages, body.tools)
        try:
            prompt = await self._off_loop.run(said, lambda: self._conversations.prompt(body.messages, _tools(body)))
        except PromptTooLong as error:
            raise self._too_long(error) from error
        except TimeoutError as error:
            raise BadRequest(str(error), param="messages", code="context_length_exceeded") from error
        if again:
            self._given_breaks = self._conversations.breaks
        asked = body.sampling()
        number, costs = await self._sample(prompt, asked)
        return Reply(prompt, [self._choice(cost, asked.stop) for cost in costs], number)

    async def tokens(self, body: TokenBody) -> Reply:
        """Raises BadRequest, and what the engine raises."""
        for request, reply in self._answered:
            if any(_begins(body.token_ids, [*reply.prompt, *choice.token_ids]) for choice in reply.choices):
                request.contained = True
        number, costs = await self._sample(body.token_ids, body.sampling())
        choices = [Choice(cost.generation, {}, _finish_reason(cost.generation), cost) for cost in costs]
        return Reply(body.token_ids, choices, number)

    def deliver(self, request: DistinctRequest, body: ChatBody | TokenBody) -> Reply:
        """The reply to a finished request, before it is sent. Raises what the request raised."""
        reply = request.task.result()
        if any(earlier is request for earlier, _ in self._answered):
            return reply
        self._answered.append((request, reply))
        if isinstance(body, ChatBody):
            for choice in reply.choices:
                self._conversations.record(body.messages, _tools(body), reply.prompt, choice, request)
        self._progress.prefix_breaks = self._conversations.breaks - self._given_breaks
        return reply

    def received(self) -> tuple[BranchingRows, list[Choice], list[TurnRecord], list[Spans]]:
        """Rows, choices, turn records and token spans of what the agent received; called when the agent has ended.
        They stand in the order in which they were recorded, or else sent. A request is one turn, however many choices
        it has."""
        self._agent_worked(self._progress.clock())
        rows, choices, records, places = BranchingRows(), [], [], []
        received = (reply for request, reply in self._answered if request.received)
        for reply in sorted(received, key=lambda reply: reply.number):
            costs = [choice.cost.record(rows.add(reply.prompt, choice.generation)) for choice in reply.choices]
            records.append(of_one_turn(costs))
            places.append(tuple(chain.from_iterable(rows.spans[len(rows.spans) - len(costs) :])))
            choices += reply.choices
        return rows, choices, records, places

    def transmissions(self) -> list[str]:
        """The ids of everything that was sent to the agent."""
        return [sent.id for request, _ in self._answered for sent in request.transmissions]

    def stop_reason(self, choices: Sequence[Choice]) -> StopReason:
        """The stop reason of an episode whose agent received `choices`."""
        if self.limit is not None or not choices:
            return self.limit or "done"
        return "done" if choices[-1].finish_reason == "stop" else "length"

    async def _sample(self, prompt: Sequence[int], asked: RequestedSampling) -> tuple[int, list[TurnCost]]:
        """The number of a turn and its choices."""
        if self._turns == self.limits.max_turns:
            self.limit = "max_turns"
            raise BadRequest(
                f"env.max_turns is {self.limits.max_turns}, and the episode has made so many requests already: end it "
                "earlier, or raise env.max_turns",
                code="max_turns_exceeded",
            )
        self._turns += 1  # a request is a turn, however many choices it asks for
        first, self._sampled = self._sampled, self._sampled + asked.n
        self._count_running(+1)
        costs: list[TurnCost] = []
        try:
            digest = request_digest(prompt, asked)
            if (given := self.recorded.given(digest)) is not None:
                number, costs = given[0], [given[1]]
                return number, costs
            costs = await _gather([self._one(prompt, asked, first + k, k) for k in range(asked.n)])
            return await self._recorded(digest, costs, asked), costs
        except PromptTooLong as error:
            raise self._too_long(error) from error
        except (EngineDied, EpisodeFailed) as error:
            if not self.broken.done():
                self.broken.set_exception(error)
            raise
        finally:
            self._count_running(-1, costs[-1] if costs else None)

    async def _recorded(self, digest: str, costs: Sequence[TurnCost], asked: RequestedSampling) -> int:
        """The number of a new turn, once it is stored."""
        self._recording += 1
        self._progress.enter(self._phase)
        try:
            kept = [_cut(cost.generation, asked.stop, self.renderer)[0] for cost in costs]
            return await self.recorded.add(digest, costs, kept, self._running - 1)
        finally:
            self._recording -= 1

    def _too_long(self, error: PromptTooLong) -> BadRequest:
        self.limit = "max_tokens"
        return BadRequest(str(error), param="messages", code="context_length_exceeded")

    async def _one(self, prompt: Sequence[int], asked: RequestedSampling, number: int, k: int) -> TurnCost:
        t = self._ticket
        longest = self.limits.max_new_tokens
        sampling = self.limits.sampling(
            t, number, tuple(dict.fromkeys((*self.renderer.stop_token_ids, *asked.stop_token_ids)))
        )
        if asked.seed is not None:
            sampling = replace(sampling, seed=_seed(t.seed, asked.seed, k, prompt))
        if asked.max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=min(longest, asked.max_new_tokens))
        began = self._progress.clock()
        generation = await generate(self._engine, f"{t.id}-{t.attempt}/{number}", prompt, sampling)
        self._progress.sampled(len(generation.token_ids))
        if generation.stop_reason == "abort":
            raise EpisodeFailed("aborted", f"ticket {t.id}: the engine aborted request {number}")
        return TurnCost(generation, self._progress.clock() - began)

    def _choice(self, cost: TurnCost, stops: Sequence[str]) -> Choice:
        """The choice for a generation; everything after a stop string is cut off."""
        generation, hit = _cut(cost.generation, stops, self.renderer)
        message = self.renderer.parse(generation.token_ids.tolist())
        if hit is not None:
            message["content"] = message["content"].partition(hit)[0]
        for index, call in enumerate(message.get("tool_calls") or []):
            # Agents tell calls apart by their ids: ids that the model did not write are made unique.
            if call["id"] == f"call{index:05d}":
                call["id"] = f"call{self._named:05d}"
                self._named += 1
        return Choice(generation, message, "stop" if hit is not None else _finish_reason(generation), cost, hit)

    def _count_running(self, by: int, ended: TurnCost | None = None) -> None:
        self._running += by
        self._progress.enter(self._phase)
        self._agent_worked(self._progress.at)
        self._idle = (self._progress.at, None if self._running else ended)

    @property
    def _phase(self) -> str:
        if self._recording:
            return "record"
        return "generate" if self._running else "environment"

    def _agent_worked(self, until: float) -> None:
        """Counts the agent's time since the last request with the turn before it."""
        since, turn = self._idle
        if turn is not None:
            turn.agent_s = until - since


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    return [] if body.tool_choice == "none" else body.tools or []


def _begins(ids: Sequence[int], prefix: Sequence[int]) -> bool:
    return len(ids) >= len(prefix) and list(ids[: len(prefix)]) == list(prefix)


def _cut(generation: Generation, stops: Sequence[str], renderer: Renderer) -> tuple[Generation, str | None]:
    """The generation up to the first token with which the text holds a stop string, and that string. Stopping there
    depends on the earlier tokens alone, so the rest is distributed as if the engine had stopped."""
    ids = generation.token_ids.tolist()
    if not stops or not any(stop in renderer.decode(ids) for stop in stops):
        return generation, None
    # More tokens only extend the text, so bisection needs a few decodings instead of one per token.
    n = 1 + bisect_left(range(1, len(ids)), True, key=lambda n: any(stop in renderer.decode(ids[:n]) for stop in stops))
    text, g = renderer.decode(ids[:n]), generation
    hit = min((stop for stop in stops if stop in text), key=text.index)
    return g.first(n), hit


def _finish_reason(generation: Generation) -> Literal["stop", "length"]:
    return "stop" if generation.stop_reason == "stop" else "length"


def _seed(ticket: int, wanted: int, k: int, prompt: Sequence[int]) -> int:
    """A seed: equal requests get equal replies within an episode, and other replies in other episodes of the group."""
    text = json.dumps([ticket, wanted, k, list(prompt)]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


async def _gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, or the first exception; then the others are cancelled."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
