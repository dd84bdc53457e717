"""What the budget predicts, against real runs on the CPU and counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from asyncrl.config import Config
from asyncrl.learner.backends.hf.row_attention import in_one_call, layout_of
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.backends.shared_prefixes import Segment
from asyncrl.learner.budget import fake_pass
from asyncrl.learner.budget.counting import Counter
from asyncrl.learner.budget.fake_pass import Pass, cost_of_pass, count, fullest
from asyncrl.learner.budget.memory import parts
from asyncrl.model import QUICKSTART
from tests.learner.budget.allocator import peak_of

pytestmark = pytest.mark.system


def qwen3(**sizes: Any) -> Qwen3Config:
    return Qwen3Config(**{"head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True} | sizes)


SMALL_06B = qwen3(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8,
)  # fmt: skip
OF_30M = qwen3(
    vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
# A CPU without bfloat16's own instructions needs 65 times as long for a product: this one is small.
OF_3M = qwen3(
    vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip

OF_EXPERTS = Qwen3MoeConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=512, moe_intermediate_size=256, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
    max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip


def config(max_tokens: int, tokens: int, dtype: str = "float32", **learner: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"dtype": dtype},
            "env": {"max_tokens": max_tokens},
            "actors": {"max_new_tokens": max_tokens // 4},
            "learner": {"tokens_per_micro_batch": tokens, **learner},
        }
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("quickstart", config(256, 8192)),
        ("3M", config(512, 2048)),
        ("3M", config(512, 2048, activation_checkpointing=True)),
        ("3M", config(256, 512, "bfloat16")),
        ("experts", config(512, 2048)),
    ],
)
def test_the_predicted_peak_is_that_of_the_allocator(name: str, asked: Config) -> None:
    shapes = {"3M": OF_3M, "experts": OF_EXPERTS}
    shape: PretrainedConfig = shapes.get(name) or AutoConfig.from_pretrained(QUICKSTART)
    predicted = cost_of_pass(asked, shape)
    torch.manual_seed(0)
    made = {"3M": Qwen3ForCausalLM, "experts": Qwen3MoeForCausalLM}.get(name)
    model = made(shape) if made is not None else None
    backend = TorchBackend(asked, model, device="cpu")
    part = fullest(asked, asked.learner.tokens_per_micro_batch)
    part.token_ids.remainder_(shape.vocab_size)

    def two_updates() -> None:
        for _ in range(2):
            backend.accumulate([part, part], lambda _, scores: scores.logprobs.sum())
            backend.clip(1.0)
            backend.apply(1e-6)

    measured = peak_of(two_updates)
    weights = sum(x.nbytes for x in backend._model.parameters())
    total = 2 * weights + predicted.optimizer + predicted.activations
    assert total == pytest.approx(weights + measured, rel=0.1), (total, weights + measured)


@pytest.mark.parametrize(("backend", "dtype"), [("torch", "float32"), ("torch", "bfloat16"), ("fsdp2", "bfloat16")])
def test_of_a_mixture_of_experts_those_that_a_token_meets_are_counted(backend: str, dtype: str) -> None:
    rows, length, shape = 4, 512, OF_EXPERTS
    hidden, heads, kv, d, vocabulary = 256, 4, 2, 64, 4096
    layer = hidden * d * (heads + 2 * kv) + heads * d * hidden + hidden * shape.num_experts
    layer += shape.num_experts_per_tok * 3 * hidden * shape.moe_intermediate_size
    tokens = rows * length
    linear = 6 * 4 * layer * tokens + 8 * vocabulary * hidden * (tokens - rows)
    attention = 4 * rows * heads * (2 + 5) * 2 * d * length * (length + 1) / 2
    found = cost_of_pass(config(length, tokens, dtype, backend=backend), shape)
    assert found.flops == pytest.approx(linear + attention, rel=0.02)
    with torch.device("meta"):
        assert found.parameters == sum(p.numel() for p in Qwen3MoeForCausalLM(shape).parameters())


def deeper(shape: PretrainedConfig, depth: int, **fields: Any) -> PretrainedConfig:
    return type(shape).from_dict(shape.to_dict() | {"num_hidden_layers": depth, "layer_types": None, **fields})


@pytest.mark.parametrize("shape", [deeper(OF_3M, 5), deeper(OF_EXPERTS, 5)], ids=["dense", "experts"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_two_shallow_copies_tell_what_a_whole_model_does(shape: PretrainedConfig, checkpointing: str) -> None:
    asked = config(256, 1024, "bfloat16", activation_checkpointing=checkpointing)
    found, whole = cost_of_pass(asked, shape), count(asked, shape, fullest(asked, 1024), gpu=False)
    assert (found.parameters, found.rest, found.optimizer) == whole[:3]
    assert found.activations == max(whole.most_in_pass, whole.most_in_update)
    assert found.flops == pytest.approx(whole.flops, rel=1e-12)


def test_layers_that_differ_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def noted(config: Config, model: PretrainedConfig, *rest: Any) -> Any:
        counted.append(model.num_hidden_layers)
        return count(config, model, *rest)

    monkeypatch.setattr(fake_pass, "count", noted)
    windows = deeper(OF_3M, 5, use_sliding_window=True, sliding_window=512, max_window_layers=3)
    alike = deeper(OF_3M, 5)
    alike.of_each_layer = [{"theta": 1e4}] * 5  # equal, though no set can hold them
    for shape in (alike, windows, deeper(OF_EXPERTS, 5, mlp_only_layers=[3])):
        cost_of_pass(config(256, 1024), shape)
    assert counted == [2, 3, 5, 5]


def test_the_arithmetic_is_that_of_a_count_by_hand() -> None:
    """Qwen3-0.6B: a matrix product takes 2 operations for each weight and token, and twice that in the backward pass;
    the head computes its logits once more there. Attention: two products forward, five backward, below the diagonal."""
    rows, length = 4, 1024
    asked = config(length, rows * length, "bfloat16")
    hidden, inner, heads, kv, d, vocabulary = 1024, 3072, 16, 8, 128, 151936
    layer = hidden * d * (heads + 2 * kv) + heads * d * hidden + 3 * hidden * inner
    tokens = rows * length
    linear = 6 * 28 * layer * tokens + 8 * vocabulary * hidden * (tokens - rows)
    attention = 28 * rows * heads * (2 + 5) * 2 * d * length * (length + 1) / 2
    found = cost_of_pass(asked, SMALL_06B)
    assert found.flops == pytest.approx(linear + attention, rel=0.02)
    assert found.parameters == 596_049_920
    checkpointed = cost_of_pass(config(length, tokens, "bfloat16", activation_checkpointing=True), SMALL_06B)
    # The recomputation of a layer ends before its last product, whose result nothing needs.
    again = 2 * 28 * (layer - hidden * inner) * tokens + 28 * rows * heads * 2 * 2 * d * length * (length + 1) / 2
    assert checkpointed.flops == pytest.approx(linear + attention + again, rel=0.02)
    assert checkpointed.activations < 0.25 * found.activations


def test_attention_in_one_call_is_counted_as_its_kernel_takes_memory() -> None:
    """Nothing but result, log-sum-exp and random state outlives the call; the backward pass needs more for a while."""
    segments = (Segment(0, 40, 0), Segment(40, 24, 10))
    seen = torch.cat([torch.arange(40), torch.arange(10), torch.arange(40, 64)])
    heads, kv, d, tokens, keys = 4, 2, 16, 64, 74
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (
            torch.empty(tokens, n, d, dtype=torch.bfloat16).requires_grad_() for n in (heads, kv, kv)
        )  # fmt: skip
    with Counter([query, key, value]) as counted:
        out = in_one_call(query, key, value, layout_of(segments, seen))
        forward, held = counted.flops, counted.live
        out.backward(torch.empty_like(out))
    result = tokens * heads * d * 2 + tokens * heads * 4 + 16
    gathered = 2 * keys * kv * d * 2
    assert held == pytest.approx(result + gathered, abs=256), "and the bounds of the rows"
    pairs = 40 * 41 / 2 + 24 * 10 + 24 * 25 / 2
    assert forward == 4 * heads * d * pairs
    assert counted.flops == pytest.approx(3.5 * forward)
    temporary = tokens * heads * (d + 1) * 4 + 2 * keys * heads * d * 2
    gradients = tokens * heads * d * 2 + gathered
    assert counted.peak >= held + out.nbytes + temporary
    assert counted.peak <= held + out.nbytes + temporary + 2 * gradients + 256


def test_on_a_gpu_the_pass_computes_the_same_and_holds_no_more() -> None:
    asked = config(512, 2048, "bfloat16", backend="fsdp2")
    rows, call = cost_of_pass(asked, OF_30M), cost_of_pass(asked, OF_30M, gpu=True)
    assert call.flops == pytest.approx(rows.flops, rel=1e-6)
    assert 0.8 * rows.activations < call.activations < rows.activations


def test_a_copy_on_each_node_is_shared_by_the_ranks_of_a_node() -> None:
    cost = Pass(tokens=1, parameters=1 << 20, layer=0, rest=0, optimizer=0, activations=0, flops=0.0)

    def of_rank(shard: str) -> list[int]:
        learner = {"backend": "fsdp2", "ranks": 16, "shard": shard}
        launch = {"backend": "ray", "host": "auto", "gpus": {"learner": 1}}
        config = Config.model_validate({"learner": learner, "launch": launch, "weights": {"channel": "zmq"}})
        return [parts(config, cost)[part] for part in ("weights", "gradients", "optimizer")]

    assert of_rank("all") == [4 << 16, 4 << 16, 8 << 16]
    assert of_rank("node") == [4 << 17, 4 << 17, 8 << 17]
