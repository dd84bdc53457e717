from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl.actors.engines.hf.decode import FusedForward, supported
from asyncrl.actors.engines.hf.engine import HFEngine
from asyncrl.actors.engines.hf.forward import KVCache, Part, PlainForward
from asyncrl.actors.engines.protocol import Engine, EngineDied, Generation, Sampling
from asyncrl.errors import ConfigError
from tests.actors.engines.engine_conformance import *  # noqa: F403
from tests.actors.engines.engine_conformance import (
    HeldWeights,
    Subject,
    all_of,
    judge,
    play,
    prompts,
    sampling,
    until,
)

VOCAB, MAX_TOKENS = 64, 256
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MAX_TOKENS, "initializer_range": 0.3,
}  # fmt: skip


def tiny(seed: int, family: str = "qwen3", **changes: Any) -> Any:
    torch.manual_seed(seed)
    match family:
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True, **changes)).eval()
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False, **changes)).eval()
            for name, p in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(p)
            return model
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**SIZES, **changes)).eval()
    raise ValueError(family)


@pytest.fixture(params=["fused", "plain"])
def subject(request: pytest.FixtureRequest) -> Subject:
    def make() -> Engine:
        return HFEngine(tiny(0), slots=16, max_tokens=MAX_TOKENS, forward=request.param)

    return Subject(make, tiny(0), tiny(1), VOCAB, MAX_TOKENS)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_the_fused_pass_gives_the_logits_of_the_models_own(family: str) -> None:
    model = tiny(0, family)
    assert supported(model.config)
    fused_cache, plain_cache = (KVCache(model, 4, 64) for _ in range(2))
    fused, plain = FusedForward(model, fused_cache), PlainForward(model, plain_cache)
    tokens = torch.randint(0, VOCAB, (4, 64))

    def part(rows: Any, cut: slice) -> Part:
        own = tokens[rows, cut]
        columns = torch.arange(cut.start, cut.stop).expand(len(own), -1)
        return Part(own, columns, rows, torch.full((len(own),), own.shape[1] - 1), 32)

    some, others = torch.tensor([0, 2]), torch.tensor([1, 3])
    for parts in (
        [part(slice(0, 4), slice(0, 10))],  # a prefill
        [part(slice(0, 4), slice(10, 11))],  # one token each, in place
        [part(some, slice(11, 30)), part(others, slice(11, 12))],  # both at once
        [part(others, slice(12, 30))],
    ):
        logits = fused(parts)
        torch.testing.assert_close(logits, plain(parts), atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        expected = model(tokens[others, :30]).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fused_cache.k, plain_cache.k, atol=1e-5, rtol=1e-4)


def test_a_prompt_begun_by_another_is_copied_not_computed() -> None:
    model = tiny(0)
    shared = prompts(Subject(HFEngine, model, model, VOCAB, MAX_TOKENS), 1)[0] * 3

    async def scenario(engine: Engine) -> tuple[list[Generation], dict[str, float]]:
        outs = await all_of(engine, [([*shared, i], sampling(i, n=8)) for i in range(32)])
        return outs, dict(engine.load_stats())

    subject = Subject(lambda: HFEngine(model, slots=16, max_tokens=MAX_TOKENS), model, model, VOCAB, MAX_TOKENS)
    outs, stats = play(subject, scenario)
    for i, out in enumerate(outs):
        np.testing.assert_allclose(out.logprobs, judge(model, [*shared, i], out.token_ids, 1.0), atol=1e-4)
    assert stats["prefilled"] < 2 * len(shared)
    assert sum(out.prefilled or 0 for out in outs) == stats["prefilled"], "each request says what was computed for it"
    assert stats["prefix_reused"] >= 30 * len(shared)


def test_what_new_weights_make_the_engine_compute_again_counts_as_prefilled() -> None:
    model = tiny(0)

    async def scenario(engine: Engine) -> tuple[Generation, Generation]:
        alone = await engine.generate("alone", [1, 2, 3, 4], sampling(n=40))
        running = asyncio.ensure_future(engine.generate("running", [5, 6, 7, 8], sampling(n=200)))
        await until(lambda: engine.load_stats()["generated"] > 50)
        await engine.pause(True)
        await engine.load(HeldWeights(tiny(1), 1))
        await engine.resume()
        return alone, await running

    alone, running = play(
        Subject(lambda: HFEngine(tiny(0), slots=2, max_tokens=MAX_TOKENS), model, model, VOCAB, 64), scenario
    )
    assert alone.prefilled == 4
    assert running.prefilled is not None
    assert running.prefilled == 4 + 4 + int((running.versions == 0).sum())


def test_truncated_sampling_stays_within_its_nucleus_and_reports_its_probability() -> None:
    model = tiny(0)
    subject = Subject(lambda: HFEngine(model, slots=4, max_tokens=MAX_TOKENS), model, model, VOCAB, MAX_TOKENS)
    asked = [([5, 6], Sampling(30, 1.0, (), 1, top_k=1)), ([5, 6], Sampling(30, 1.0, (), 1, top_p=0.5))]
    single, nucleus = play(subject, lambda e: all_of(e, asked))
    assert single.logprobs.tolist() == [0.0] * 30
    ids = [5, 6, *nucleus.token_ids.tolist()]
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor([ids])).logits[0, 1:-1], -1)
    for p, token, logprob in zip(probabilities, nucleus.token_ids, nucleus.logprobs, strict=True):
        ranked, order = p.sort(descending=True)
        kept = int((ranked.cumsum(0) - ranked < 0.5).sum())
        assert token in order[:kept]
        assert abs(float(torch.log(p[int(token)] / ranked[:kept].sum())) - logprob) < 1e-4


def test_a_cancelled_call_frees_its_slot() -> None:
    model = tiny(0)

    async def scenario(engine: Engine) -> None:
        running = asyncio.ensure_future(engine.generate("a", [1], sampling(n=200)))
        await until(lambda: engine.load_stats()["running"] == 1)
        running.cancel()
        await engine.generate("b", [1], sampling(n=1))
        assert engine.load_stats()["running"] == 0

    play(Subject(lambda: HFEngine(model, slots=1, max_tokens=MAX_TOKENS), model, model, VOCAB, MAX_TOKENS), scenario)


def test_a_model_with_too_few_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.max_tokens is 300 .* 256 positions"):
        HFEngine(tiny(0), slots=1, max_tokens=300)


def test_a_dead_engine_says_why() -> None:
    engine = HFEngine(tiny(0), slots=1, max_tokens=MAX_TOKENS)
    engine._forward = None  # type: ignore[assignment]

    async def scenario(engine: Engine) -> None:
        with pytest.raises(EngineDied, match="engine ended"):
            await engine.generate("a", [1], sampling())
        with pytest.raises(EngineDied, match="NoneType"):
            await engine.generate("b", [1], sampling())

    play(Subject(lambda: engine, None, None, VOCAB, MAX_TOKENS), scenario)
