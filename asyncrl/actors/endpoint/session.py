"""One episode as the endpoint sees it: requests in, what was sampled kept as rows.

    request ──> prompt ids (conversations.py) ──> engine ──> answer ──received (delivery.py)──> rows (episodes/rows.py)

Only what the agent received is part of the episode, which is known for good at its end.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from bisect import bisect_left
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, TypeVar

from asyncrl.actors.endpoint.conversations import Conversations
from asyncrl.actors.endpoint.deduplication import Call, Calls
from asyncrl.actors.endpoint.delivery import WasRead
from asyncrl.actors.endpoint.replies import Answer, Reply
from asyncrl.actors.endpoint.requests import BadRequest, ChatBody, TokenBody, Wish
from asyncrl.actors.engines.protocol import Engine, EngineDied, Generation, PromptTooLong, Sampling
from asyncrl.actors.episodes.episode import EpisodeFailed, Limits, Progress
from asyncrl.actors.episodes.rows import Branches
from asyncrl.actors.rendering.template import Renderer
from asyncrl.trajectory import StopReason, Ticket

T = TypeVar("T")


class Session:
    """The requests of one episode, from its ticket's first to its end."""

    def __init__(
        self,
        ticket: Ticket,
        engine: Engine,
        renderer: Renderer,
        limits: Limits,
        progress: Progress,
        was_read: WasRead = lambda id: False,
    ) -> None:
        """`was_read`: of asyncrl's own client, whether it read a transmission; without one, every client is foreign."""
        self.calls = Calls(was_read)
        self.limit: StopReason | None = None
        """The limit of the episode that a request ran into."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with what ends the episode, or the actor, from below."""
        self.renderer, self.limits, self.temperature = renderer, limits, ticket.temperature
        self._ticket, self._engine, self._progress = ticket, engine, progress
        self._conversations = Conversations(renderer)
        self._asked = self._running = self._named = 0
        self._answered: list[tuple[Call, Reply]] = []

    async def chat(self, body: ChatBody) -> Reply:
        """Raises BadRequest, and what the engine raises."""
        prompt = self._conversations.prompt(body.messages, _tools(body))
        answers = []
        for generation in await self._sample(prompt, body.wish()):
            answers.append(self._read(generation, body.wish().stop))
        return Reply(prompt, answers)

    async def tokens(self, body: TokenBody) -> Reply:
        """Raises BadRequest, and what the engine raises."""
        for call, reply in self._answered:
            if any(_begins(body.token_ids, [*reply.prompt, *answer.token_ids]) for answer in reply.answers):
                call.contained = True
        generations = await self._sample(body.token_ids, body.wish())
        return Reply(
            body.token_ids, [Answer(g, {}, "stop" if g.stop_reason == "stop" else "length") for g in generations]
        )

    def deliver(self, call: Call, body: ChatBody | TokenBody) -> Reply:
        """The answer of a call that is done, on its way to the agent. Raises what the call raised."""
        reply = call.task.result()
        if any(known is call for known, _ in self._answered):
            return reply
        self._answered.append((call, reply))
        if isinstance(body, ChatBody):
            for answer in reply.answers:
                self._conversations.said(body.messages, _tools(body), reply.prompt, answer, call)
        self._progress.prefix_breaks = self._conversations.breaks
        return reply

    def received(self) -> tuple[Branches, list[Answer]]:
        """The answers that the agent received by now, as rows and in the order in which they were given."""
        rows, answers = Branches(), []
        for call, reply in self._answered:
            for answer in reply.answers if call.received else ():
                rows.add(reply.prompt, answer.generation)
                answers.append(answer)
        return rows, answers

    def transmissions(self) -> list[str]:
        """The ids of everything that was sent to the agent."""
        return [sent.id for call, _ in self._answered for sent in call.transmissions]

    def stop_reason(self, answers: Sequence[Answer]) -> StopReason:
        """Why an episode ended in which the agent received `answers`."""
        if self.limit is not None or not answers:
            return self.limit or "done"
        return "done" if answers[-1].finish_reason == "stop" else "length"

    async def _sample(self, prompt: Sequence[int], wish: Wish) -> list[Generation]:
        if self._asked + wish.n > self.limits.max_turns:
            self.limit = "max_turns"
            raise BadRequest(
                f"the episode's env.max_turns is {self.limits.max_turns}, and {self._asked} answers were sampled",
                code="max_turns_exceeded",
            )
        first, self._asked = self._asked, self._asked + wish.n
        self._move(+1)
        try:
            return await _together([self._one(prompt, wish, first, k) for k in range(wish.n)])
        except PromptTooLong as error:
            self.limit = "max_tokens"
            raise BadRequest(str(error), param="messages", code="context_length_exceeded") from error
        except (EngineDied, EpisodeFailed) as error:
            if not self.broken.done():
                self.broken.set_exception(error)
            raise
        finally:
            self._move(-1)

    async def _one(self, prompt: Sequence[int], wish: Wish, first: int, k: int) -> Generation:
        t = self._ticket
        longest = self.limits.max_new_tokens
        sampling = Sampling(
            max_new_tokens=longest if wish.max_new_tokens is None else min(longest, wish.max_new_tokens),
            temperature=t.temperature,
            stop_token_ids=tuple(dict.fromkeys((*self.renderer.stop_token_ids, *wish.stop_token_ids))),
            seed=t.seed * 1_000_003 + first + k if wish.seed is None else _seed(t.seed, wish.seed, k, prompt),
            top_p=self.limits.top_p,
            top_k=self.limits.top_k,
        )
        generation = await self._engine.generate(f"{t.id}-{t.attempt}/{first + k}", prompt, sampling)
        self._progress.tokens += len(generation.token_ids)
        if generation.stop_reason == "abort":
            raise EpisodeFailed("aborted", f"{t.id} in request {first + k}")
        return generation

    def _read(self, generation: Generation, stops: Sequence[str]) -> Answer:
        """As an answer; where a stop string came, what was sampled behind it is cut off, as if it never had been."""
        generation, hit = _cut(generation, stops, self.renderer)
        message = self.renderer.parse(generation.token_ids.tolist())
        if hit is not None:
            message["content"] = message["content"].partition(hit)[0]
        for index, call in enumerate(message.get("tool_calls") or []):
            # Agents tell calls apart by their ids; of those that the model did not write each is made unique.
            if call["id"] == f"call{index:05d}":
                call["id"] = f"call{self._named:05d}"
                self._named += 1
        return Answer(generation, message, "stop" if hit is not None else _ended(generation))

    def _move(self, by: int) -> None:
        self._running += by
        self._progress.enter("generate" if self._running else "environment")


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    return [] if body.tool_choice == "none" else body.tools or []


def _begins(ids: Sequence[int], other: Sequence[int]) -> bool:
    return len(ids) >= len(other) and list(ids[: len(other)]) == list(other)


def _cut(generation: Generation, stops: Sequence[str], renderer: Renderer) -> tuple[Generation, str | None]:
    """Up to the first token with which the text holds a stop string, and that string. Stopping there depends on the
    tokens before alone, so what is left is distributed as if the engine had stopped."""
    ids = generation.token_ids.tolist()
    if not stops or not any(stop in renderer.decode(ids) for stop in stops):
        return generation, None
    # More tokens only add to a text: halving finds the first with a few decodings instead of one per token.
    n = 1 + bisect_left(range(1, len(ids)), True, key=lambda n: any(stop in renderer.decode(ids[:n]) for stop in stops))
    text, g = renderer.decode(ids[:n]), generation
    hit = min((stop for stop in stops if stop in text), key=text.index)
    return Generation(g.token_ids[:n], g.logprobs[:n], g.versions[:n], g.stop_reason), hit


def _ended(generation: Generation) -> Literal["stop", "length"]:
    return "stop" if generation.stop_reason == "stop" else "length"


def _seed(ticket: int, wanted: int, k: int, prompt: Sequence[int]) -> int:
    """The same request gives the same answer within an episode, and another one in another episode of the group."""
    text = json.dumps([ticket, wanted, k, list(prompt)]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


async def _together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, or the first exception; then nothing goes on."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
