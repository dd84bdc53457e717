"""Plays an episode with an agent and the real openai client over real sockets; only the engine is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from asyncrl.actors.endpoint.agent import AgentPlayer
from asyncrl.actors.endpoint.clients import Clients
from asyncrl.actors.endpoint.server import EndpointServer
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.rendering.template import TemplateRenderer
from asyncrl.trajectory import Trajectory
from tests.actors.fakes import FakeEngine, ticket

TOKENIZER = build_tokenizer()
RENDERER = TemplateRenderer(TOKENIZER)
LIMITS = EpisodeLimits(max_turns=8, max_tokens=200, max_new_tokens=40, call_s=1.0)
TOOLS: Any = [{"type": "function", "function": {"name": "lookup", "description": "", "parameters": {}}}]
CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "fox"}}</tool_call><|im_end|>'
USER = {"role": "user", "content": "What is fox + owl?"}
Agent = Callable[[Any, Any], Awaitable[Any]]


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def text_of(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids)))


def saying(*outputs: str) -> FakeEngine:
    texts = iter(outputs)
    return FakeEngine(lambda *_: encode(next(texts)), LIMITS.max_tokens)


def played(agent: Any, engine: FakeEngine, limits: EpisodeLimits = LIMITS, **options: Any) -> Trajectory:
    async def episode() -> Trajectory:
        server = EndpointServer("policy", limits.max_tokens, options.get("constraints", "refuse"))
        async with server as endpoint, Clients(20.0) as clients:
            play = AgentPlayer(agent, endpoint, clients, engine, RENDERER, limits, actor="a", env_name="agent")
            asked = ticket(2, group=5, kind=options.get("kind", "train"))
            asked = replace(asked, durable="turns" in options, turns=tuple(options.get("turns", ())))
            return await play(asked, options.get("progress", Progress(0.0)))

    # Within it an agent may import its SDK, which takes seconds of CPU the first time.
    return asyncio.run(asyncio.wait_for(episode(), 50))


def ask(client: Any, messages: Sequence[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=list(messages), **options)


def sampled(row: Any) -> str:
    return text_of(row.token_ids[row.mask])
