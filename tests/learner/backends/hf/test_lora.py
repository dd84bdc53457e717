from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends.hf import lora
from asyncrl.learner.backends.hf.reference import Reference
from asyncrl.learner.backends.hf.torch import TorchBackend
from tests.learner.backends.hf.test_torch import one_update, pack_rows, rows
from tests.learner.tiny import tiny_config, tiny_model


def backend(*, model: PreTrainedModel | None = None, seed: int = 0, **adapters: Any) -> TorchBackend:
    config = tiny_config(lora={"r": 4} | adapters, seed=seed)
    return TorchBackend(config, model or tiny_model(), device="cpu")


def base_of(learner: TorchBackend) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in learner._model.named_parameters() if not p.requires_grad}


def logits(model: Any) -> Tensor:
    return model.eval()(rows()[0][0][None]).logits.detach()


def test_the_base_is_never_touched_and_little_is_trained(tmp_path: Path) -> None:
    learner = backend()
    before, start = base_of(learner), dict(learner.weights())
    assert all(torch.equal(w, p) for w, p in zip(start.values(), tiny_model().parameters(), strict=True))
    one_update(learner, 0)
    learner.mark()
    marked = learner._marked
    assert marked is not None
    assert all("lora_" in name for name in marked[0]), "a rollback needs a copy of what is trained, no more"
    sent = {n: t.clone() for n, t in learner.weights()}
    learner.save(tmp_path)
    assert all(torch.equal(t, before[n]) for n, t in base_of(learner).items())
    assert sent.keys() == start.keys()
    assert {n for n in sent if not torch.equal(sent[n], start[n])} == {n for n in sent if n.endswith("proj.weight")}
    assert all(torch.equal(t, sent[n]) for n, t in learner.weights()), "however often they are merged"
    trained = sum(p.numel() for p in learner._model.parameters() if p.requires_grad)
    assert sum(s["exp_avg"].numel() for s in learner._optimizer.state.values()) == trained


def test_what_is_published_scores_as_what_is_trained() -> None:
    learner = backend()
    one_update(learner, 0)
    merged = tiny_model()
    merged.load_state_dict(dict(learner.weights()), strict=False)
    plain = TorchBackend(tiny_config(), merged, device="cpu")
    (mine,), (theirs,) = (x.logprobs([pack_rows(rows())]) for x in (learner, plain))
    torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=1e-5, rtol=1e-5)


def test_the_checkpoint_is_a_model_and_an_adapter_over_its_base(tmp_path: Path) -> None:
    learner = backend(use_rslora=True, exclude_modules=["k_proj"])
    one_update(learner, 0)
    learner.save(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    adapted = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    torch.testing.assert_close(logits(adapted), logits(merged), atol=1e-5, rtol=1e-5)
    assert float((logits(merged) - logits(tiny_model())).abs().max()) > 1e-3
    assert not any("k_proj" in n for n, _ in adapted.named_parameters() if "lora_" in n)
    assert sum(p.stat().st_size for p in (tmp_path / "adapter").iterdir()) < 60_000


def test_adapters_are_drawn_from_the_seed_of_the_learner_alone() -> None:
    torch.manual_seed(1)
    one = backend(seed=5)
    torch.manual_seed(2)
    same, other = backend(seed=5), backend(seed=6)
    drawn = [{n: p for n, p in b._model.named_parameters() if "lora_A" in n} for b in (one, same, other)]
    assert all(torch.equal(drawn[0][n], drawn[1][n]) for n in drawn[0])
    assert not any(torch.equal(drawn[0][n], drawn[2][n]) for n in drawn[0])


def test_the_reference_is_the_base_without_a_second_copy() -> None:
    model = tiny_model()
    learner = TorchBackend(tiny_config(lora={"r": 4}, kl_coef=0.1), model, device="cpu")
    assert isinstance(learner._reference, Reference)
    held = sum(t.numel() for t in learner._reference.state_dict().values())
    assert held == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ({"target_modules": ["nowhere"]}, ["learner.lora.target_modules", "nowhere", "Qwen3ForCausalLM"]),
        ({"target_modules": ["q_proj", "embed_tokens"]}, ["learner.lora.target_modules", "embeddings", "stay frozen"]),
        ({"target_modules": ["lm_head"]}, ["learner.lora.target_modules", "head", "stay frozen"]),
    ],
)
def test_modules_that_cannot_be_adapted_are_refused(adapters: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        backend(**adapters)
    assert all(word in str(refused.value) for word in words)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"learner\.lora\.r is 4, and peft is not installed: .*asyncrl\[lora\]"):
        backend()


def test_checkpoints_of_other_adapters_are_refused_by_name(tmp_path: Path) -> None:
    learner = backend()
    one_update(learner, 0)
    learner.save(tmp_path / "lora")
    plain = TorchBackend(tiny_config(), tiny_model(), device="cpu")
    one_update(plain, 0)
    plain.save(tmp_path / "plain")
    with pytest.raises(RunError, match=r"was written with learner\.lora\.r 4"):
        plain.load(tmp_path / "lora")
    with pytest.raises(RunError, match=r"not written with learner\.lora"):
        learner.load(tmp_path / "plain")
    with pytest.raises(RunError, match=r"has other adapters: .*lora_A"):
        backend(r=5).load(tmp_path / "lora")
    with pytest.raises(RunError, match="has other adapters"):
        backend(target_modules=["q_proj"]).load(tmp_path / "lora")
    with pytest.raises(RunError, match="adapters of another model"):
        backend(model=tiny_model(seed=9)).load(tmp_path / "lora")


def test_what_cannot_be_combined_is_refused_at_the_start() -> None:
    for learner, words in (
        ({"lora": {"r": 4}, "backend": "megatron"}, r"learner\.lora\.r is 4 and learner\.backend megatron"),
        ({"lora": {"r": 4, "lora_dropout": 0.1}}, r"learner\.lora\.lora_dropout is 0\.1"),
    ):
        with pytest.raises(ValueError, match=words):
            Config.model_validate({"learner": learner})
