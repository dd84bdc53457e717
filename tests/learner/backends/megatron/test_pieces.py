"""A matrix in pieces, one on each rank that shares it: weights, a vocabulary, and the logprobs over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.learner.backends.logprobs import selected_logprobs, sum_of_squared_probabilities
from asyncrl.learner.backends.megatron.names import Layout, from_hf, placed, to_hf
from tests.learner.ranks import on_ranks
from tests.learner.tiny import VOCABULARY, tiny_model

NAMES = (
    "embedding.word_embeddings.weight",
    "decoder.layers.1.self_attention.linear_qkv.weight",
    "decoder.layers.1.self_attention.linear_qkv.bias",
    "decoder.layers.1.self_attention.linear_proj.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.0.pre_mlp_layernorm.weight",
)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_weights_go_to_pieces_and_come_back(name: str, size: int) -> None:
    model = tiny_model("qwen2")
    state, layout = model.state_dict(), Layout(4, 2, 8, VOCABULARY)
    pieces = [from_hf(name, state.__getitem__, layout, rank, size) for rank in range(size)]
    whole = to_hf(name, pieces, layout)
    assert set(whole) == set(placed(name)[0])
    for n, tensor in whole.items():
        assert torch.equal(tensor, state[n])


def test_queries_stand_with_the_keys_and_values_of_their_group() -> None:
    layout = Layout(heads=4, groups=2, head_dim=1, vocabulary=1)
    rows = {"q": torch.tensor([0.0, 1, 2, 3]), "k": torch.tensor([10.0, 11]), "v": torch.tensor([20.0, 21])}
    name = "decoder.layers.0.self_attention.linear_qkv.bias"
    pieces = [from_hf(name, lambda n: rows[n.split(".")[4][0]], layout, rank, 2).tolist() for rank in range(2)]
    assert pieces == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_a_vocabulary_that_ranks_cannot_share_evenly_is_filled_up() -> None:
    layout, whole = Layout(4, 2, 8, 5), torch.arange(10.0).view(5, 2)
    pieces = [from_hf("output_layer.weight", lambda _: whole, layout, rank, 2) for rank in range(2)]
    assert [p.shape for p in pieces] == [(3, 2), (3, 2)]
    assert pieces[1][2].tolist() == [0, 0]
    assert torch.equal(to_hf("output_layer.weight", pieces, layout)["lm_head.weight"], whole)


def vocabulary_parts(temperature: float, tokens: int, vocabulary: int) -> list[Tensor]:
    from asyncrl.learner.backends.megatron.logprobs import parallel_logprobs

    hidden, weight, targets = head(tokens, vocabulary)
    group = torch.distributed.group.WORLD
    assert group is not None
    rows = -(-vocabulary // 2)
    own = weight[group.rank() * rows : (group.rank() + 1) * rows].detach().clone().requires_grad_()
    found = parallel_logprobs(
        hidden, own, targets, temperature, first=group.rank() * rows, vocabulary=vocabulary, group=group
    )
    (found[0].sin().sum() + 0.3 * found[1].sum()).backward()
    assert hidden.grad is not None
    assert own.grad is not None
    return [*found, hidden.grad, own.grad]


def head(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tokens, 8, generator=g), torch.randn(vocabulary, 8, generator=g)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocabulary, (tokens,), generator=g)


def test_logprobs_of_a_shared_vocabulary(tmp_path: Path) -> None:
    tokens, vocabulary = 700, 37  # more than a chunk, and not even
    first, second = on_ranks(2, tmp_path, vocabulary_parts, 0.7, tokens, vocabulary)
    hidden, weight, targets = head(tokens, vocabulary)
    logprobs, entropy = selected_logprobs(hidden, weight, targets, 0.7)
    (logprobs.sin().sum() + 0.3 * entropy.sum()).backward()
    squares = sum_of_squared_probabilities(hidden, weight, 0.7)
    for found in (first, second):
        for mine, theirs in zip(found, (logprobs, entropy, squares), strict=False):
            torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(found[3], hidden.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([first[4], second[4]]), weight.grad, atol=2e-5, rtol=1e-5)
