"""Whatever a conversation does, every sampled token stands under the loss once, behind what it was sampled after.

The fake engine's logprobs number the tokens that it sampled, so each can be found again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.actors.endpoint.agent import AgentPlayer
from asyncrl.actors.endpoint.clients import Clients
from asyncrl.actors.endpoint.server import EndpointServer
from asyncrl.actors.engines.protocol import Generation, Sampling
from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.envs.tool_env import ToolEnvironment
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.rendering.template import TemplateRenderer
from asyncrl.trajectory import CONTEXT, Trajectory
from asyncrl.wire import decode_trajectory, encode_trajectory
from tests.actors.fakes import FakeEngine, ticket
from tests.rendering.test_template import FORGETS_THINKING, with_template

TOKENIZER = build_tokenizer()
STABLE, FORGETFUL = TemplateRenderer(TOKENIZER), with_template(FORGETS_THINKING)
(STOP,) = STABLE.stop_token_ids
LIMITS = EpisodeLimits(max_turns=64, max_tokens=3000, max_new_tokens=60, call_s=5.0)
EPISODE = ticket(seed=3)


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


ids = st.lists(st.integers(0, len(TOKENIZER) - 1).filter(lambda i: i != STOP), max_size=12)
said = st.sampled_from(
    [
        '<tool_call>{"name": "lookup", "arguments": {"key": "fox"}}</tool_call>',
        '<tool_call>{"name": "lookup", "arguments": {"key": "fox"}}</tool_call>' * 3,
        '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "lookup", "arguments": ["\\ud800"]}</tool_call>',
        "<tool_call>{oops",
        "<think>\nHm.\n</think>\n\n82",
        " 82\n",
        "",
    ]
).map(encode)
outputs = st.tuples(ids | said, st.booleans()).map(lambda o: [*o[0], STOP] if o[1] or not o[0] else o[0])


class NumberingEngine(FakeEngine):
    """Says `script` round and round; its k-th request is sampled by version k % 5; and it remembers the answers."""

    def __init__(self, script: Sequence[Sequence[int]]) -> None:
        super().__init__(lambda *_: script[(len(self.calls) - 1) % len(script)], LIMITS.max_tokens)
        self.answers: list[tuple[list[int], Generation]] = []

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        self.held_version = (0, len(self.calls) % 5)
        generation = await super().generate(request, prompt, sampling)
        self.answers.append((list(prompt), generation))
        return generation


def check(t: Trajectory, answers: Sequence[tuple[list[int], Generation]]) -> None:
    """`answers`: what must be in `t`, in any order, and nothing else."""
    at = {float(g.logprobs[0]): (prompt, g) for prompt, g in answers}
    for row in t.rows:
        assert len(row.token_ids) == len(row.mask) == len(row.logprobs) == len(row.versions)
        assert set(row.versions[~row.mask]) <= {CONTEXT}
        assert not row.logprobs[~row.mask].any()
        n = int(np.argmax(row.mask))
        while n < len(row):
            prompt, g = at.pop(float(row.logprobs[n]))
            end = n + len(g.token_ids)
            assert row.token_ids[:n].tolist() == prompt, "it was sampled after something else"
            assert TOKENIZER.decode(row.token_ids[n:end]) == TOKENIZER.decode(g.token_ids)
            for name in ("token_ids", "logprobs", "versions"):
                np.testing.assert_array_equal(getattr(row, name)[n:end], getattr(g, name))
            assert row.mask[n:end].all()
            rest = row.mask[end:]
            n = end + int(np.argmax(rest)) if rest.any() else len(row)
    assert not at, "sampled, delivered, and in no row"
    assert t.num_policy_tokens == sum(len(g.token_ids) for _, g in answers)
    assert decode_trajectory([bytes(f) for f in encode_trajectory(t)]).digest() == t.digest()


class Talks(ToolEnvironment):
    """Tools, and a user who goes on when there was no call."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__((self.lookup,), max_turns=99, max_tool_chars=20)
        self._words = iter(words)

    async def step(self, message: Any) -> Turn:
        word = next(self._words, None)
        if message.get("tool_calls") and word is not None:
            return await super().step(message)
        return Turn(done=True) if word is None else Turn(messages=[{"role": "user", "content": word}])

    async def lookup(self, key: str) -> str:
        """Look up a key.

        Args:
            key: the word
        """
        return key * 30


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(outputs, min_size=1, max_size=6),
    words=st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=9), max_size=8),
    renderer=st.sampled_from([STABLE, FORGETFUL]),
)
def test_native_episodes(script: list[list[int]], words: list[str], renderer: TemplateRenderer) -> None:
    engine, progress = NumberingEngine(script), Progress(0.0)

    async def episode() -> Trajectory:
        result = await play(EPISODE, lambda: Talks(words), engine, renderer, LIMITS, progress)
        return result.trajectory(EPISODE, progress, actor="a", env_name="e")

    t = asyncio.run(asyncio.wait_for(episode(), 20))
    check(t, engine.answers)
    assert t.turns == len(engine.answers)
    assert len(t.rows) == 1 + progress.prefix_breaks


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[asyncio.Runner, EndpointServer, Clients]]:
    with asyncio.Runner() as runner:

        async def opened() -> tuple[EndpointServer, Clients]:
            return await EndpointServer("policy", LIMITS.max_tokens).__aenter__(), Clients(20.0)

        endpoint, clients = runner.run(opened())
        yield runner, endpoint, clients
        runner.run(clients.__aexit__())
        runner.run(endpoint.__aexit__())


moves = st.lists(
    st.tuples(
        st.sampled_from(["go", "go", "go", "branch", "edit", "choices", "stop", "stream", "together", "again", "none"]),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=8,
)


OPTIONS: dict[str, dict[str, Any]] = {
    "choices": {"n": 2},
    "stop": {"stop": ["o", "2"]},
    "stream": {"stream": True},
    "none": {"tool_choice": "none"},
}


class Agent:
    """Makes `moves` on a set of conversations, each a list of messages that ends with an assistant's."""

    def __init__(self, moves: Sequence[tuple[str, int]]) -> None:
        self._moves = moves
        self._talks: list[list[Any]] = []

    async def __call__(self, task: Any, client: Any) -> float:
        self._client = client
        self._talks = [await self._asked([{"role": "user", "content": "What is fox + owl?"}])]
        for n, (move, i) in enumerate(self._moves):
            talk = self._talks[i % len(self._talks)]
            more = self._answered(talk, n)
            if move == "branch":
                cut = [k for k, message in enumerate(talk) if message["role"] == "assistant"]
                upto = talk[: cut[i % len(cut)] + 1]
                self._talks.append(await self._asked(self._answered(upto, n)))
            elif move == "edit":
                self._talks.append(
                    await self._asked([*talk[:-1], {"role": "assistant", "content": f"so {n}"}, more[-1]])
                )
            elif move == "together":
                jobs = [self._asked(self._answered(other, n + k)) for k, other in enumerate(self._talks[:3])]
                self._talks += await asyncio.gather(*jobs)
            elif move == "again":
                key = {"idempotency-key": f"k{n}"}
                await self._asked(more, extra_headers=key)
                self._talks.append(await self._asked(more, extra_headers=key))
            else:
                self._talks.append(await self._asked(more, **OPTIONS.get(move, {})))
        return 0.0

    def _answered(self, talk: list[Any], n: int) -> list[Any]:
        calls = talk[-1].get("tool_calls") or []
        if not calls:
            return [*talk, {"role": "user", "content": f"word {n}"}]
        return [*talk, *({"role": "tool", "tool_call_id": c["id"], "content": f"{n}"} for c in calls)]

    async def _asked(self, messages: list[Any], **options: Any) -> list[Any]:
        tools = [tool.schema for tool in Talks(()).tools]
        answer = await self._client.chat.completions.create(model="m", messages=messages, tools=tools, **options)
        if not options.get("stream"):
            return [*messages, json.loads(answer.choices[-1].message.model_dump_json(exclude_none=True))]
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        async for chunk in answer:
            delta = chunk.choices[0].delta
            message["content"] += delta.content or ""
            for call in delta.tool_calls or []:
                message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
        return [*messages, message]


@settings(max_examples=40, deadline=None)
@given(script=st.lists(outputs, min_size=1, max_size=6), moves=moves, renderer=st.sampled_from([STABLE, FORGETFUL]))
def test_through_the_endpoint(
    stage: Any, script: list[list[int]], moves: list[tuple[str, int]], renderer: TemplateRenderer
) -> None:
    runner, endpoint, clients = stage
    engine, agent = NumberingEngine(script), Agent(moves)

    async def act(task: Any, client: Any) -> float:
        return await agent(task, client)

    async def episode() -> Trajectory:
        player = AgentPlayer(act, endpoint, clients, engine, renderer, LIMITS, actor="a", env_name="e")
        return await asyncio.wait_for(player(EPISODE, Progress(0.0)), 20)

    t = runner.run(episode())
    stops = any(move == "stop" for move, _ in moves)
    check(t, [cut(t, prompt, g) if stops else (prompt, g) for prompt, g in engine.answers])
    assert t.turns == len(engine.answers) - sum(move == "choices" for move, _ in moves), "a request is a turn"


def cut(t: Trajectory, prompt: list[int], g: Generation) -> tuple[list[int], Generation]:
    """A generation as far as it is under the loss: up to the first token with which a stop string is there."""
    ids = g.token_ids.tolist()
    kept = sum(int(np.isin(row.logprobs[row.mask], g.logprobs).sum()) for row in t.rows)
    if kept == len(ids):
        return prompt, g
    assert any(stop in TOKENIZER.decode(ids[:kept]) for stop in ("o", "2"))
    assert not any(stop in TOKENIZER.decode(ids[: kept - 1]) for stop in ("o", "2"))
    return prompt, Generation(g.token_ids[:kept], g.logprobs[:kept], g.versions[:kept], g.stop_reason)
