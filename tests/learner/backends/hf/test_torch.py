from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.backends.protocol import Packed, Scores
from tests.learner.tiny import VOCABULARY, tiny_config, tiny_model

LENGTHS = (17, 1, 40, 5, 30, 23, 30)


def rows(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """(token ids, mask) of each row, with holes. The fifth and sixth begin alike, the seventh is the fifth again."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for n in LENGTHS:
        mask = torch.rand(n, generator=g) < 0.5
        mask[0] = False
        made.append((torch.randint(0, VOCABULARY, (n,), generator=g), mask))
    made[5][0][:20] = made[4][0][:20]
    made[6][0][:] = made[4][0]
    return made


def pack_rows(chosen: list[tuple[Tensor, Tensor]]) -> Packed:
    return Packed(
        torch.cat([ids for ids, _ in chosen]),
        torch.cat([mask for _, mask in chosen]),
        tuple(len(ids) for ids, _ in chosen),
    )


def sum_of_logprobs(_: int, scores: Scores) -> Tensor:
    return scores.logprobs.sum() + 0.1 * scores.entropy.sum()


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_packed_rows_score_as_each_alone(family: str) -> None:
    model = tiny_model(family)
    logits = [model(ids[None]).logits[0].detach() for ids, _ in rows()]
    backend = TorchBackend(tiny_config(), model, device="cpu")
    (scores,) = backend.logprobs([pack_rows(rows())])
    at = 0
    for (ids, mask), row_logits in zip(rows(), logits, strict=True):
        log_p = row_logits.log_softmax(-1)
        for t in range(len(ids)):
            expected = float(log_p[t - 1, ids[t]]) if mask[t] else 0.0
            assert float(scores.logprobs[at + t]) == pytest.approx(expected, abs=2e-5)
        at += len(ids)


def gradients(backend: TorchBackend) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in backend._model.named_parameters() if p.grad is not None}
    backend.discard()
    return found


def test_gradients_do_not_depend_on_the_micro_batches() -> None:
    backend = TorchBackend(tiny_config(), tiny_model(), device="cpu")
    backend.accumulate([pack_rows(rows())], sum_of_logprobs)
    together = gradients(backend)
    backend.accumulate([pack_rows([row]) for row in rows()], sum_of_logprobs)
    alone = gradients(backend)
    assert together.keys() == alone.keys()
    for name, gradient in together.items():
        torch.testing.assert_close(alone[name], gradient, atol=2e-5, rtol=1e-4)


def test_gradients_equal_a_plain_loop() -> None:
    plain = tiny_model()
    total = torch.zeros(())
    for ids, mask in rows():
        log_p = plain(ids[None]).logits[0].log_softmax(-1)
        for t in mask.nonzero()[:, 0].tolist():
            total = total + log_p[t - 1, ids[t]] - 0.1 * (log_p[t - 1].exp() * log_p[t - 1]).sum()
    total.backward()
    backend = TorchBackend(tiny_config(), tiny_model(), device="cpu")
    backend.accumulate([pack_rows(rows())], sum_of_logprobs)
    got = gradients(backend)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=2e-5, rtol=1e-4)


def test_checkpointed_activations_are_not_kept() -> None:
    def kept(checkpointing: bool) -> int:
        backend = TorchBackend(tiny_config(activation_checkpointing=checkpointing), tiny_model(), device="cpu")
        held: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            scores = backend._scorer(pack_rows(rows()))
        assert scores.logprobs.requires_grad
        return sum(held.values())

    assert kept(True) < 0.4 * kept(False)


def test_a_row_without_policy_tokens_and_an_empty_micro_batch_of_them() -> None:
    backend = TorchBackend(tiny_config(), tiny_model(), device="cpu")
    silent = [(ids, torch.zeros_like(mask)) for ids, mask in rows()]
    backend.accumulate([pack_rows(silent)], sum_of_logprobs)
    assert all(float(g.abs().sum()) == 0 for g in gradients(backend).values())


def test_temperature_is_that_of_sampling() -> None:
    cold = tiny_config().model_copy(update={"actors": tiny_config().actors.model_copy(update={"temperature": 0.5})})
    one = TorchBackend(tiny_config(), tiny_model(), device="cpu").logprobs([pack_rows(rows())])[0]
    half = TorchBackend(cold, tiny_model(), device="cpu").logprobs([pack_rows(rows())])[0]
    assert float((one.logprobs - half.logprobs).abs().max()) > 0.1


def one_update(backend: TorchBackend, seed: int) -> None:
    backend.accumulate([pack_rows(rows(seed))], sum_of_logprobs)
    backend.clip(1.0)
    backend.apply(1e-3)


def test_save_and_load_go_on_bit_for_bit(tmp_path: Path) -> None:
    first = TorchBackend(tiny_config(), tiny_model(), device="cpu")
    one_update(first, 0)
    first.save(tmp_path)
    one_update(first, 1)
    second = TorchBackend(tiny_config(), tiny_model(seed=9), device="cpu")
    second.load(tmp_path)
    one_update(second, 1)
    for (name, a), (_, b) in zip(first.weights(), second.weights(), strict=True):
        assert torch.equal(a, b), name


def test_rollback_undoes_updates() -> None:
    backend = TorchBackend(tiny_config(), tiny_model(), device="cpu")
    one_update(backend, 0)
    backend.mark()
    before = {n: t.clone() for n, t in backend.weights()}
    one_update(backend, 1)
    after = {n: t.clone() for n, t in backend.weights()}
    backend.rollback()
    assert all(torch.equal(t, before[n]) for n, t in backend.weights())
    one_update(backend, 1)
    assert all(torch.equal(t, after[n]) for n, t in backend.weights())


def test_tied_weights_are_sent_once_and_in_the_models_dtype() -> None:
    config = tiny_config().model_copy(update={"model": tiny_config().model.model_copy(update={"dtype": "bfloat16"})})
    backend = TorchBackend(config, tiny_model(), device="cpu")
    sent = dict(backend.weights())
    assert "model.embed_tokens.weight" in sent
    assert "lm_head.weight" not in sent
    assert {t.dtype for t in sent.values()} == {torch.bfloat16}
    (scores,) = backend.logprobs([pack_rows(rows())])
    exact = TorchBackend(tiny_config(), tiny_model(), device="cpu").logprobs([pack_rows(rows())])[0]
    assert scores.logprobs.dtype == torch.float32
    assert 0 < float((scores.logprobs - exact.logprobs).abs().max()) < 0.2


def test_in_bfloat16_the_heads_products_are_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 they would take a GPU longer than all layers of a small model."""
    config = tiny_config().model_copy(update={"model": tiny_config().model.model_copy(update={"dtype": "bfloat16"})})
    backend = TorchBackend(config, tiny_model(), device="cpu")
    products = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                products.extend(a.dtype for a in args if isinstance(a, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with Watched():
        backend.accumulate([pack_rows(rows())], lambda _, scores: scores.logprobs.sum())
    assert len(products) > 10
    assert set(products) == {torch.bfloat16}


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    TorchBackend(tiny_config(), tiny_model("llama"), device="cpu").save(tmp_path)
    with pytest.raises(RunError, match="another model"):
        TorchBackend(tiny_config(), tiny_model("qwen3"), device="cpu").load(tmp_path)


def test_a_model_whose_logits_are_scaled_is_refused() -> None:
    model = tiny_model("llama")
    plain_forward = model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        output = plain_forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled
    with pytest.raises(ConfigError, match="plain causal decoder"):
        TorchBackend(tiny_config(), model, device="cpu")


def test_sliding_window_is_refused_when_a_row_is_longer() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.learner.tiny import SIZE

    config = Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=10, max_window_layers=0)
    backend = TorchBackend(tiny_config(), Qwen2ForCausalLM(config), device="cpu")
    with pytest.raises(ValueError, match=r"sliding window of 10.*env.max_tokens"):
        backend.logprobs([pack_rows(rows())])
