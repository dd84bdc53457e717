"""What every engine must do, whatever generates behind it. A test module of an engine imports all of it and defines the
fixture `subject`; the model is tiny and random, the judge is an independent forward pass of transformers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.actors.engines.protocol import Engine, EngineDied, Generation, PromptTooLong, Sampling, WeightsMismatch
from asyncrl.weights.protocol import WeightsVersion

DEADLINE_S = 60.0
TOLERANCE = 1e-4
VOCAB, MAX_TOKENS = 64, 256
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": MAX_TOKENS, "initializer_range": 0.3,
}  # fmt: skip


def tiny(seed: int, tied: bool = True) -> Any:
    """A model that vLLM's and SGLang's kernels can compute."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)).eval()


@dataclass
class Subject:
    """One engine under test: how to make it, and the model that it was given."""

    make: Callable[[], Engine]
    model: Any
    other: Any
    """The same architecture with other weights."""
    vocab: int
    max_tokens: int
    runner: asyncio.Runner | None = None
    """The event loop of all scenarios, for an engine that outlives one; else each scenario has its own."""


class HeldWeights:
    """Weights in memory, in the shape of the protocol."""

    def __init__(self, model: Any, version: int, branch: int = 0) -> None:
        self.id = WeightsVersion(branch, version, "0" * 32)
        self._named = dict(model.named_parameters())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, p.detach()) for name, p in self._named.items())

    def close(self) -> None:
        return None


class Shared:
    """One running engine for all scenarios: starting it puts back the first weights and begins to count anew."""

    def __init__(self, engine: Any, first: Any) -> None:
        self._engine, self._first = engine, first
        self._started = False
        self._before: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        if not self._started:
            await self._engine.start()
            self._started = True
        if self._engine.held_version != (0, 0):
            await self._engine.pause(True)
            await self._engine.load(HeldWeights(self._first, 0))
            await self._engine.resume()
        self._before = dict(self._engine.load_stats())

    async def close(self) -> None:
        assert self._engine.load_stats()["running"] == 0

    def load_stats(self) -> dict[str, float]:
        now = self._engine.load_stats()
        return {name: now[name] - self._before[name] if name == "generated" else now[name] for name in now}


async def closed_under(engine: Any, count: int) -> None:
    """The engine behind a Shared one is closed under so many requests, which end with that."""
    begun = [asyncio.ensure_future(engine.generate(f"r{i}", [1], sampling(n=MAX_TOKENS))) for i in range(count)]
    await engine.pause(True)
    await engine._engine.close()
    await asyncio.wait(begun, timeout=10)
    assert {type(r.exception()) for r in begun} == {EngineDied}
    with pytest.raises(EngineDied, match="was closed"):
        await engine.generate("late", [1], sampling())


def play(subject: Subject, scenario: Callable[[Engine], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        engine = subject.make()
        await engine.start()
        try:
            return await asyncio.wait_for(scenario(engine), DEADLINE_S)
        finally:
            await engine.close()

    return subject.runner.run(run()) if subject.runner else asyncio.run(run())


def judge(model: Any, prompt: list[int], ids: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probabilities of `ids` after `prompt` by one plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids.tolist()])).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    return logprobs[torch.arange(len(ids)), torch.tensor(ids).long()].numpy()


def prompts(subject: Subject, count: int, seed: int = 0) -> list[list[int]]:
    """Of different lengths; every other one begins like its neighbour, so that prefixes are shared."""
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, subject.vocab, int(n)).tolist() for n in rng.integers(1, 40, count)]
    return [found[i - 1] + p if i % 2 else p for i, p in enumerate(found)]


def sampling(seed: int = 0, n: int = 24, temperature: float = 1.0, stop: tuple[int, ...] = ()) -> Sampling:
    return Sampling(n, temperature, stop, seed)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def all_of(engine: Engine, asked: list[tuple[list[int], Sampling]]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(f"r{i}", p, s) for i, (p, s) in enumerate(asked)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_an_independent_forward_pass(subject: Subject, temperature: float) -> None:
    asked = [(p, sampling(i, temperature=temperature)) for i, p in enumerate(prompts(subject, 20))]
    for (prompt, _), out in zip(asked, play(subject, lambda e: all_of(e, asked)), strict=True):
        assert len(out.token_ids) == 24
        assert out.stop_reason == "length"
        assert out.token_ids.dtype == np.int32
        assert out.logprobs.dtype == np.float32
        assert out.versions.tolist() == [0] * 24
        np.testing.assert_allclose(
            out.logprobs, judge(subject.model, prompt, out.token_ids, temperature), atol=TOLERANCE
        )


def test_greedy_takes_the_most_probable_token(subject: Subject) -> None:
    asked = [(p, sampling(i, n=12, temperature=0.0)) for i, p in enumerate(prompts(subject, 6))]
    for (prompt, _), out in zip(asked, play(subject, lambda e: all_of(e, asked)), strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(12):
                ids.append(int(subject.model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert out.token_ids.tolist() == ids[len(prompt) :]
        np.testing.assert_allclose(out.logprobs, judge(subject.model, prompt, out.token_ids, 1.0), atol=TOLERANCE)


def test_a_stop_id_ends_the_output_and_is_part_of_it(subject: Subject) -> None:
    prompt = prompts(subject, 1)[0]

    async def scenario(engine: Engine) -> tuple[Generation, Generation]:
        free = await engine.generate("free", prompt, sampling(temperature=0.0))
        stop = (int(free.token_ids[7]),)
        return free, await engine.generate("cut", prompt, sampling(temperature=0.0, stop=stop))

    free, cut = play(subject, scenario)
    end = free.token_ids.tolist().index(int(cut.token_ids[-1]))
    assert cut.stop_reason == "stop"
    assert cut.token_ids.tolist() == free.token_ids[: end + 1].tolist()


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(subject: Subject) -> None:
    prompt = prompts(subject, 1)[0]
    crowd = [(p, sampling(100 + i)) for i, p in enumerate(prompts(subject, 30, seed=1))]
    if not getattr(subject.make(), "honours_seeds", True):
        pytest.skip("this engine declares that it does not honour seeds")
    alone, again, other = play(subject, lambda e: all_of(e, [(prompt, sampling(s)) for s in (7, 7, 8)]))
    crowded = play(subject, lambda e: all_of(e, [*crowd, (prompt, sampling(7))]))[-1]
    assert alone.token_ids.tolist() == again.token_ids.tolist() == crowded.token_ids.tolist()
    assert alone.token_ids.tolist() != other.token_ids.tolist()


def test_an_abort_returns_what_there_is(subject: Subject) -> None:
    prompt = prompts(subject, 1)[0]

    async def scenario(engine: Engine) -> Generation:
        running = asyncio.ensure_future(engine.generate("long", prompt, sampling(3, n=subject.max_tokens)))
        await until(lambda: engine.load_stats()["generated"] >= 5)
        await engine.abort("long")
        await engine.abort("unknown")
        return await running

    out = play(subject, scenario)
    assert out.stop_reason == "abort"
    assert 5 <= len(out.token_ids) < subject.max_tokens - len(prompt)
    np.testing.assert_allclose(out.logprobs, judge(subject.model, prompt, out.token_ids, 1.0), atol=TOLERANCE)


@pytest.mark.parametrize("recompute", [True, False])
def test_new_weights_between_two_tokens(subject: Subject, recompute: bool) -> None:
    asked = [(p, sampling(i, n=150)) for i, p in enumerate(prompts(subject, 12))]

    async def scenario(engine: Engine) -> list[Generation]:
        running = asyncio.ensure_future(all_of(engine, asked))
        await until(lambda: engine.load_stats()["generated"] >= 12 * 20)
        new = HeldWeights(subject.other, 4, branch=1)
        await engine.check(new)
        await engine.pause(recompute)
        before = -1.0
        while before < (now := engine.load_stats()["generated"]):  # what a server has sampled may still be under way
            before = now
            await asyncio.sleep(0.1)
        await engine.load(new)
        await asyncio.sleep(0.05)
        assert engine.load_stats()["generated"] == before, "sampled while paused"
        await engine.resume()
        assert engine.held_version == (1, 4)
        return await running

    played = list(zip(asked, play(subject, scenario), strict=True))
    # On a busy machine a server may have ended some of them before it is told to pause, but not all.
    assert any(out.versions.any() for _, out in played)
    for (prompt, _), out in played:
        k = int((out.versions == 0).sum())
        if k == 150:
            continue
        assert k > 0
        assert out.versions.tolist() == [0] * k + [4] * (150 - k)
        old = judge(subject.model, prompt, out.token_ids, 1.0)
        new = judge(subject.other, prompt, out.token_ids, 1.0)
        np.testing.assert_allclose(out.logprobs[:k], old[:k], atol=TOLERANCE)
        if recompute:
            np.testing.assert_allclose(out.logprobs[k:], new[k:], atol=TOLERANCE)
        assert np.abs(out.logprobs[k:] - old[k:]).max() > 0.01, "the new weights had no effect"


def test_after_new_weights_a_fresh_request_is_the_new_policys_alone(subject: Subject) -> None:
    prompt = prompts(subject, 4)[3]

    async def scenario(engine: Engine) -> Generation:
        await engine.generate("before", prompt, sampling(1))
        await engine.pause(False)  # also where running sequences may keep their cache, a new one may not inherit it
        await engine.load(HeldWeights(subject.other, 1))
        await engine.resume()
        return await engine.generate("after", [*prompt, 1, 2], sampling(1))

    out = play(subject, scenario)
    np.testing.assert_allclose(out.logprobs, judge(subject.other, [*prompt, 1, 2], out.token_ids, 1.0), atol=TOLERANCE)


def test_a_next_turn_continues_the_one_before(subject: Subject) -> None:
    async def scenario(engine: Engine) -> list[tuple[list[int], Generation]]:
        turns = []
        row = prompts(subject, 1)[0]
        for turn in range(4):
            out = await engine.generate(f"turn{turn}", row, sampling(turn, n=10))
            turns.append((row, out))
            row = row + out.token_ids.tolist() + [3, 1, 4]
        return turns

    for prompt, out in play(subject, scenario):
        np.testing.assert_allclose(out.logprobs, judge(subject.model, prompt, out.token_ids, 1.0), atol=TOLERANCE)


def test_a_request_tells_when_its_first_token_came_and_what_was_computed_before(subject: Subject) -> None:
    """Tells nothing rather than something wrong: None where there is no token, or the engine does not count."""

    async def scenario(engine: Engine) -> tuple[list[Generation], list[float], Generation]:
        outs, took = [], []
        for i in range(3):
            began = time.monotonic()
            outs.append(await engine.generate(f"r{i}", prompts(subject, 6)[2 * i], sampling(i, n=8)))
            took.append(time.monotonic() - began)
        return outs, took, await interrupted(engine)

    async def interrupted(engine: Engine) -> Generation:
        await engine.pause(False)
        waiting = asyncio.ensure_future(engine.generate("waits", [1, 2, 3], sampling(n=8)))
        await asyncio.sleep(0.2)
        await engine.resume()
        return await waiting

    outs, took, waited = play(subject, scenario)
    for i, (out, seconds) in enumerate(zip(outs, took, strict=True)):
        assert out.queue_s is not None
        assert 0 < out.queue_s <= seconds
        assert out.prefilled is None or 0 <= out.prefilled <= len(prompts(subject, 6)[2 * i])
    assert waited.queue_s is not None
    assert waited.queue_s >= 0.2, "the wait for a paused engine counts"


def test_two_hundred_requests_at_once(subject: Subject) -> None:
    asked = [(p, sampling(i, n=1 + i % 17)) for i, p in enumerate(prompts(subject, 200))]
    outs = play(subject, lambda e: all_of(e, asked))
    assert [len(o.token_ids) for o in outs] == [1 + i % 17 for i in range(200)]
    for i in range(0, 200, 23):
        expected = judge(subject.model, asked[i][0], outs[i].token_ids, 1.0)
        np.testing.assert_allclose(outs[i].logprobs, expected, atol=TOLERANCE)


def test_a_prompt_that_is_too_long_is_refused_and_one_that_just_fits_is_cut(subject: Subject) -> None:
    async def scenario(engine: Engine) -> Generation:
        with pytest.raises(PromptTooLong, match=r"env\.max_tokens"):
            await engine.generate("long", [1] * subject.max_tokens, sampling())
        return await engine.generate("fits", [1] * (subject.max_tokens - 2), sampling(n=9))

    out = play(subject, scenario)
    assert out.stop_reason == "length"
    assert len(out.token_ids) == 2


def test_weights_that_do_not_fit_change_nothing(subject: Subject) -> None:
    prompt = prompts(subject, 1)[0]

    class Misshapen(HeldWeights):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            *good, (name, last) = super().tensors()
            yield from good
            yield name, last[..., :-1]

    class Missing(HeldWeights):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(super().tensors())[:-1]

    class NotFinite(HeldWeights):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            *good, (name, last) = super().tensors()
            yield from good
            yield name, torch.full_like(last, torch.nan)

    async def scenario(engine: Engine) -> Generation:
        await engine.pause(True)
        for broken in (Misshapen, Missing, NotFinite):
            with pytest.raises(WeightsMismatch, match="do not fit"):
                await engine.check(broken(subject.other, 9))
            with pytest.raises(WeightsMismatch, match="do not fit"):
                await engine.load(broken(subject.other, 9))
        await engine.resume()
        assert engine.held_version == (0, 0)
        return await engine.generate("after", prompt, sampling(2))

    out = play(subject, scenario)
    assert out.versions.max() == 0
    np.testing.assert_allclose(out.logprobs, judge(subject.model, prompt, out.token_ids, 1.0), atol=TOLERANCE)


def test_closing_ends_what_runs(subject: Subject) -> None:
    async def scenario(engine: Engine) -> BaseException | None:
        running = asyncio.ensure_future(engine.generate("r", [1], sampling(n=subject.max_tokens)))
        await engine.pause(True)
        await engine.close()
        await asyncio.wait([running], timeout=10)
        return running.exception()

    assert type(play(subject, scenario)).__name__ == "EngineDied"
