"""What every backend does, at every number of ranks: what a plain loop over rows does with the same model.

A backend is one more entry of CASES (backend_cases.py). Each case is played once, in processes of its own; the tests
look at what it gave.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.config import ModelConfig
from asyncrl.errors import RunError
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.backends.protocol import Backend
from tests.learner.backends.backend_cases import (
    CASES,
    LORA,
    LR,
    SLOW,
    SYSTEM,
    Case,
    close,
    kept_sets,
    loss,
    megatron,
    on_cpu,
    on_nodes,
    parts,
    plain_gradients,
    played,
    stepped,
)
from tests.learner.backends.hf.test_torch import rows
from tests.learner.kept_ranks import on_kept_ranks
from tests.learner.ranks import on_ranks
from tests.learner.tiny import tiny_config, tiny_model

MARKS = dict.fromkeys(SLOW, pytest.mark.slow) | dict.fromkeys(SYSTEM, pytest.mark.system)


@pytest.fixture(scope="module", params=[pytest.param(n, marks=MARKS.get(n, ())) for n in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.startswith("megatron"):
        pytest.importorskip("megatron.core", reason="the extra megatron is not installed")
        importlib.import_module("asyncrl.learner.backends.megatron.backend")  # here once, and not in every rank
    return CASES[request.param]


def on_ranks_of(case: Case, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    if case.build is megatron:  # which shares its ranks out once for a process
        return on_ranks(case.ranks, folder, function, *arguments)
    return on_kept_ranks(case.ranks, function, *arguments)


@pytest.fixture(scope="module")
def all_found(case: Case, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("case")
    return on_ranks_of(case, folder, played, case, folder / "work")


@pytest.fixture(scope="module")
def found(all_found: list[dict[str, Any]]) -> dict[str, Any]:
    return all_found[0]


@pytest.fixture(scope="module")
def plain(case: Case) -> dict[str, Any]:
    """The same in plain transformers, peft and torch, row by row."""
    model: Any = case.model().eval()
    if adapted := case.lora:
        torch.manual_seed(tiny_config().learner.seed)
        model = get_peft_model(model, LoraConfig(**adapted, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LR, betas=(0.9, 0.95), weight_decay=0.0
    )

    def total(seed: int) -> Tensor:
        value = torch.zeros(())
        for (ids, mask), sets in zip(rows(seed), kept_sets(seed), strict=True):
            logits = model(ids[None]).logits[0]
            log_p = logits.log_softmax(-1)
            at = mask.nonzero()[:, 0]
            for t, kept in sets.items():
                among = logits[t - 1, kept].log_softmax(0)
                value = value + 0.3 * among[kept.index(int(ids[t]))] - 0.1 * (among.exp() * among).sum()
            at = at[[t not in sets for t in at.tolist()]]
            entropy = -(log_p.exp() * log_p).sum(-1)
            value = value + 0.3 * log_p[at - 1, ids[at]].sum() + 0.1 * entropy[at - 1].sum()
        return value

    value = total(0)
    value.backward()
    prefix = "base_model.model." if adapted else ""
    named = [(n.removeprefix(prefix), p) for n, p in model.named_parameters()]
    gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
    norms = []
    for seed in range(3):
        optimizer.zero_grad()
        total(seed).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    weights = dict((model.merge_and_unload() if adapted else model).named_parameters())
    return {"loss": float(value.detach()), "gradients": gradients, "norms": norms, "weights": weights}


@pytest.mark.system
def test_same_loss(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-6)


def test_the_loss_of_a_part_is_computed_where_its_scores_are(case: Case, all_found: list[dict[str, Any]]) -> None:
    """By one rank, or by those that compute the part together."""
    of_ranks = [tuple(found["asked"]) for found in all_found]
    different = set(of_ranks) - {()}
    assert sorted(i for asked in different for i in asked) == [0, 1, 2]
    assert len(different) == min(case.different, 3)
    if case.pipelined:
        assert of_ranks[0] == (), "the first stage has no scores"


def test_a_visit_shows_the_scores_of_these_parts(all_found: list[dict[str, Any]]) -> None:
    for found in all_found:
        assert sorted(found["visited"]) == found["asked"]
        for i, visited in found["visited"].items():
            assert all(torch.equal(x.detach(), y) for x, y in zip(visited, found["scores"][i], strict=True))


def test_same_gradients(found: dict[str, Any], plain: dict[str, Any]) -> None:
    scale = max(float(g.abs().max()) for g in plain["gradients"].values())
    close(
        {n: g / scale for n, g in found["gradients"].items()},
        {n: g / scale for n, g in plain["gradients"].items()},
        1e-5,
    )


def test_same_weights_after_three_updates(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    # AdamW divides by the gradient's size: where that is near rounding, a single element may differ by part of a step.
    close(found["weights"], plain["weights"], LR / 4)
    for name, weight in plain["weights"].items():
        differences = (found["weights"][name] - weight.detach()).abs()
        assert float(differences.mean()) <= 1e-6, name
        assert int((differences > 2e-5).sum()) <= 1 + differences.numel() // 1000, name


def test_every_rank_has_every_score(all_found: list[dict[str, Any]]) -> None:
    for other in all_found:
        for mine, theirs in zip(all_found[0]["scores"], other["scores"], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
        assert other["loss"] == all_found[0]["loss"]
        assert other["norms"] == all_found[0]["norms"]
        assert other["step"][1] == all_found[0]["step"][1]


def test_rollback_takes_updates_back(found: dict[str, Any]) -> None:
    assert found["norms_again"] == found["norms"][2]
    close(found["rolled_back"], found["weights"], 0.0)


def test_what_is_saved_goes_on_bit_for_bit(found: dict[str, Any]) -> None:
    close(found["resumed"], found["weights"], 0.0)
    assert "another model" in found["refused"]


def test_a_training_step_does_not_depend_on_ranks_or_micro_batches(case: Case, found: dict[str, Any]) -> None:
    lora = tuple((name, value) for name, value in case.learner if name == "lora")
    alone = Case(on_cpu(TorchBackend), plain_gradients, family=case.family, layers=case.layers, learner=lora)
    weights, numbers = stepped(alone, 100_000)
    assert found["step"][1] == pytest.approx(numbers, rel=1e-5)
    close(found["step"][0], weights, 1e-6)


@pytest.mark.parametrize("learner", [(), pytest.param(LORA, marks=pytest.mark.slow)], ids=["all", "lora"])
def test_saved_at_one_number_of_ranks_and_loaded_at_another(
    tmp_path: Path, learner: tuple[tuple[str, Any], ...]
) -> None:
    """2 -> 1 -> 2, and the export is what transformers loads."""
    whole = on_kept_ranks(1, chain, None, tmp_path / "whole", 0, 3, learner)[0]
    weights = None
    for n, (size, begin, end) in enumerate([(2, 0, 1), (1, 1, 2), (2, 2, 3)]):
        from_ = tmp_path / f"s{n - 1}" if n else None
        weights = on_kept_ranks(size, chain, from_, tmp_path / f"s{n}", begin, end, learner)[0]
    assert weights is not None
    close(weights, whole, 2e-6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "s2" / "hf")
    close({n: weights[n] for n in weights}, {n: p for n, p in loaded.named_parameters()}, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [(), LORA], ids=["all", "lora"])
def test_saved_with_a_copy_on_each_node_and_loaded_without(tmp_path: Path, adapters: Any) -> None:
    """A copy on each of two nodes -> one process -> all four ranks share one -> a copy on each."""
    whole = on_kept_ranks(1, chain, None, tmp_path / "whole", 0, 4, adapters)[0]
    copies = on_nodes(2, 2, *adapters).learner
    weights = None
    for n, (size, learner) in enumerate([(4, copies), (1, adapters), (4, adapters), (4, copies)]):
        from_ = tmp_path / f"s{n - 1}" if n else None
        weights = on_kept_ranks(size, chain, from_, tmp_path / f"s{n}", n, n + 1, learner)[0]
    assert weights is not None
    close(weights, whole, 2e-6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "s3" / "hf")
    close({n: weights[n] for n in weights}, {n: p for n, p in loaded.named_parameters()}, 0.0)


def chain(
    from_: Path | None, to: Path, begin: int, end: int, learner: tuple[tuple[str, Any], ...] = ()
) -> dict[str, Tensor]:
    backend = Fsdp2Backend(tiny_config(**dict(learner)), tiny_model(), device="cpu")
    if from_ is not None:
        backend.load(from_)
    for seed in range(begin, end):
        backend.accumulate(parts(seed), loss)
        backend.clip(1.0)
        backend.apply(LR)
    backend.save(to)
    return {n: t.clone() for n, t in backend.weights()}


def in_half(folder: Path, learner: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    config = tiny_config(cpu_offload=True, **dict(learner)).model_copy(
        update={"model": tiny_config().model.model_copy(update={"dtype": "bfloat16"})}
    )
    backend = Fsdp2Backend(config, tiny_model(), device="cpu")
    scores = backend.logprobs(parts(0))
    backend.accumulate(parts(0), loss)
    backend.clip(1.0)
    gradients = {n: p.grad.dtype for n, p in backend._model.named_parameters() if p.requires_grad}
    backend.apply(LR)
    backend.save(folder)
    sent = {n: t.clone() for n, t in backend.weights()}
    return {"scores": [s.logprobs for s in scores], "gradients": set(gradients.values()), "sent": sent}


@pytest.mark.parametrize("learner", [(), LORA], ids=["all", "lora"])
def test_half_precision_over_whole_masters(tmp_path: Path, learner: tuple[tuple[str, Any], ...]) -> None:
    """bfloat16 computes and is published; gradients, shards and checkpoints stay float32. Offloaded to the CPU, too."""
    found = on_kept_ranks(2, in_half, tmp_path / "saved", learner)[0]
    exact = TorchBackend(tiny_config(), tiny_model(), device="cpu").logprobs(parts(0))
    off = max(float((a - b.logprobs).abs().max()) for a, b in zip(found["scores"], exact, strict=True))
    assert 0 < off < 0.2
    assert found["gradients"] == {torch.float32}
    assert {t.dtype for t in found["sent"].values()} == {torch.bfloat16}
    saved = load_file(tmp_path / "saved" / "hf" / "model-00001.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.float32}
    close({n: t.bfloat16() for n, t in saved.items()}, found["sent"], 0.0)


def test_a_checkpoint_of_the_other_backend_is_refused_by_name(tmp_path: Path) -> None:
    TorchBackend(tiny_config(), tiny_model(), device="cpu").save(tmp_path / "torch")
    on_kept_ranks(1, chain, None, tmp_path / "fsdp2", 0, 1)
    with pytest.raises(RunError, match=r"not written by learner\.backend torch"):
        TorchBackend(tiny_config(), tiny_model(), device="cpu").load(tmp_path / "fsdp2")
    with pytest.raises(AssertionError, match=r"RunError: .* was not written by learner\.backend fsdp2"):
        on_ranks(1, tmp_path / "again", chain, tmp_path / "torch", tmp_path / "never", 0, 1)


def with_reference(case: Case, folder: Path) -> list[Tensor]:
    """Logprobs under the reference: at first, after an update, refreshed, loaded; then the policy's when refreshed."""
    learner = {"kl_coef": 0.1, "reference_every": 1} | dict(case.learner)
    config = tiny_config(**learner).model_copy(update={"model": ModelConfig(path=str(folder / "model"))})
    backend = case.build(config, case.model())

    def scored(of: Backend, *, reference: bool = True) -> Tensor:
        return torch.cat([s.logprobs for s in of.logprobs(parts(0), reference=reference)])

    found = [scored(backend)]
    backend.accumulate(parts(0), loss)
    backend.clip(1.0)
    backend.apply(LR)
    found.append(scored(backend))
    backend.refresh_reference()
    found.append(scored(backend))
    backend.save(folder / "saved")
    loaded = case.another(config)
    loaded.load(folder / "saved")
    return [*found, scored(loaded), scored(backend, reference=False)]


@pytest.mark.parametrize("name", ["torch", "fsdp2-2", "torch-lora", "fsdp2-2-lora"])
def test_the_reference_stays_until_it_is_refreshed(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    tiny_model(case.family).save_pretrained(tmp_path / "model")
    base = TorchBackend(tiny_config(), tiny_model(case.family), device="cpu").logprobs(parts(0))
    first, after, refreshed, loaded, policy = on_ranks_of(case, tmp_path / "meet", with_reference, case, tmp_path)[0]
    torch.testing.assert_close(first, torch.cat([s.logprobs for s in base]), atol=1e-6, rtol=1e-6)
    assert torch.equal(after, first)
    assert torch.equal(refreshed, policy)
    assert torch.equal(loaded, refreshed)
    assert float((refreshed - first).abs().max()) > 1e-4
