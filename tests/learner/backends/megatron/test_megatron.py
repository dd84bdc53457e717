"""What is Megatron-core's alone; what every backend does is in test_backend_conformance.py."""

from __future__ import annotations

import importlib
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.backends.protocol import Packed
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.ranks import DistributedRanks
from asyncrl.learner.trainer import Trainer
from tests.learner.backends.backend_cases import LR, close, loss, parts
from tests.learner.ranks import on_ranks
from tests.learner.step.test_critic import GAE, a_trainer, config_of, differ, trained, weights
from tests.learner.tiny import VOCABULARY, tiny_config, tiny_model


@pytest.fixture(scope="module")
def megatron() -> None:
    pytest.importorskip("megatron.core", reason="the extra megatron is not installed")
    importlib.import_module("asyncrl.learner.backends.megatron.backend")  # here once, and not in every rank


def a_config(**learner: Any) -> Config:
    return tiny_config(backend="megatron", **learner)


def chain(from_: Path | None, to: Path, begin: int, end: int, options: dict[str, Any]) -> dict[str, Tensor]:
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    config = a_config(backend_options=options, kl_coef=0.1, reference_every=5)
    model = tiny_model()
    model.save_pretrained(to.with_suffix(".first"))
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(to.with_suffix(".first"))})}
    )
    backend = MegatronBackend(config, model, device="cpu")
    if from_ is not None:
        backend.load(from_)
    for seed in range(begin, end):
        backend.accumulate(parts(seed), loss)
        backend.clip(1.0)
        backend.apply(LR)
    if from_ is None:
        backend.refresh_reference()
    backend.save(to)
    found = {n: t.clone() for n, t in backend.weights()}
    return found | {"reference": torch.cat([s.logprobs for s in backend.logprobs(parts(0), reference=True)])}


@pytest.mark.usefixtures("megatron")
def test_no_layer_waits_for_the_gpu_to_learn_the_rows_lengths() -> None:
    """F16: the starts of rows were on the GPU, and every layer read them several times. The device here is `meta`."""
    from asyncrl.learner.backends.megatron.scorer import Scorer

    given: list[Any] = []

    class FakeDecoder(torch.nn.Linear):
        config = SimpleNamespace(sequence_parallel=False)

    def fake_run(ids: Tensor, positions: Tensor, mask: None, *, packed_seq_params: Any) -> None:
        given.extend((ids, positions, packed_seq_params))

    scorer = Scorer(FakeDecoder(1, 1, device="meta"), fake_run, None, 1.0, None)  # type: ignore[arg-type]
    scorer.states(Packed(torch.arange(7), torch.arange(7) % 4 > 0, (4, 3)))
    ids, positions, rows = given
    assert ids.device.type == positions.device.type == "meta"
    for starts in (rows.cu_seqlens_q, rows.cu_seqlens_kv):
        assert starts.device.type == "cpu"
        assert starts.tolist() == [0, 4, 7]


def with_another_adam(fused: bool) -> tuple[dict[str, Tensor], str, bool]:
    """Weights after two updates, the optimizer's module and whether it is fused; `fused`: Megatron finds the Adam of
    Transformer Engine, faked."""
    import megatron.core.optimizer as megatrons

    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    class FakeFusedAdam(torch.optim.Optimizer):
        """Takes what Transformer Engine's takes, and keeps its count in the group."""

        def __init__(self, params: Any, *, adam_w_mode: bool, **defaults: Any) -> None:
            super().__init__(params, {**defaults, "step": 0, "bias_correction": True})

    if fused:
        megatrons.USING_PYTORCH_OPTIMIZER, megatrons.Adam = False, FakeFusedAdam
    backend = MegatronBackend(a_config(), tiny_model(), device="cpu")
    for seed in range(2):
        backend.accumulate(parts(seed), loss)
        backend.clip(1.0)
        backend.apply(LR)
    optimizer = backend._inner.optimizer
    return {n: t.clone() for n, t in backend.weights()}, type(optimizer).__module__, optimizer.param_groups[0]["fused"]


@pytest.mark.usefixtures("megatron")
def test_the_adam_of_transformer_engine_gives_way_to_torchs_fused_one(tmp_path: Path) -> None:
    """F16: it was refused, and torch's own was not fused."""
    [(plain, module, fused)] = on_ranks(1, tmp_path / "a", with_another_adam, False)
    assert (module, fused) == ("torch.optim.adamw", True)
    [(with_engine, module, fused)] = on_ranks(1, tmp_path / "b", with_another_adam, True)
    assert (module, fused) == ("torch.optim.adamw", True)
    assert all(torch.equal(tensor, with_engine[name]) for name, tensor in plain.items())


@pytest.mark.usefixtures("megatron")
@pytest.mark.system
def test_a_checkpoint_goes_on_however_the_model_is_shared(tmp_path: Path) -> None:
    """Tensor parallel -> pipeline -> data parallel with a sharded optimizer; the export is what transformers loads."""
    whole = on_ranks(1, tmp_path / "meet", chain, None, tmp_path / "whole", 0, 3, {})[0]
    first = on_ranks(2, tmp_path / "meet-0", chain, None, tmp_path / "s0", 0, 1, {"tensor_parallel": 2})[0]
    staged = {"pipeline_parallel": 2}
    second = on_ranks(2, tmp_path / "meet-1", chain, tmp_path / "s0", tmp_path / "s1", 1, 2, staged)[0]
    sharded = {"distributed_optimizer": True}
    third = on_ranks(2, tmp_path / "meet-2", chain, tmp_path / "s1", tmp_path / "s2", 2, 3, sharded)[0]
    torch.testing.assert_close(second.pop("reference"), first.pop("reference"), atol=2e-5, rtol=1e-5)
    del whole["reference"], third["reference"]
    close(third, whole, 3e-5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "s2" / "hf")
    close(third, dict(loaded.named_parameters()), 0.0)


def refused(learners: list[dict[str, Any]]) -> list[str]:
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    found = []
    for learner in learners:
        with pytest.raises(ConfigError) as caught:
            MegatronBackend(a_config(**learner), tiny_model(), device="cpu")
        found.append(str(caught.value))
    return found


@pytest.mark.usefixtures("megatron")
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    options = [{"context_parallel": 2}, {"tensor_parallel": 3}, {"tensor_parallel": 2, "pipeline_parallel": 2}]
    learners = [*({"backend_options": o} for o in options), {"cpu_offload": True}]
    unknown, uneven, too_many, offload = on_ranks(2, tmp_path, refused, learners)[0]
    assert "learner.backend_options.context_parallel" in unknown
    assert "tensor_parallel is 3, which does not divide learner.ranks = 2" in uneven
    assert "pipeline_parallel is 2, and times tensor_parallel = 2 it does not divide learner.ranks = 2" in too_many
    assert "cpu_offload" in offload


@pytest.mark.usefixtures("megatron")
def test_every_stage_has_a_layer() -> None:
    from asyncrl.learner.backends.megatron.groups import Options
    from asyncrl.learner.backends.megatron.model import layout_of, stages_of

    assert [stage.count("decoder") for stage in stages_of(7, 3)] == [3, 2, 2]
    with pytest.raises(ConfigError, match=r"pipeline_parallel is 3 and the model in model\.path has 2 layers"):
        layout_of(tiny_model().config, Options(pipeline_parallel=3))


def test_options_of_a_backend_that_has_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"learner\.backend_options .* learner\.backend fsdp2 has none"):
        tiny_config(backend="fsdp2", backend_options={"tensor_parallel": 2})


def in_half(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    config = a_config(backend_options=options)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    backend = MegatronBackend(config, tiny_model(), device="cpu")
    scores = backend.logprobs(parts(0))
    backend.accumulate(parts(0), loss)
    backend.clip(1.0)
    backend.apply(1e-5)  # below what bfloat16 tells apart
    backend.save(folder)
    sent = {n: t.clone() for n, t in backend.weights()}
    return {"scores": [s.logprobs for s in scores], "sent": sent}


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel": 2}, id="tp2"),
        pytest.param({"distributed_optimizer": True}, id="dp2", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel": 2}, id="pp2", marks=pytest.mark.slow),
    ],
)
def test_half_precision_over_whole_masters(tmp_path: Path, options: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    found = on_ranks(2, tmp_path / "meet", in_half, tmp_path / "saved", options)[0]
    exact = TorchBackend(tiny_config(), tiny_model(), device="cpu").logprobs(parts(0))
    off = max(float((a - b.logprobs).abs().max()) for a, b in zip(found["scores"], exact, strict=True))
    assert 0 < off < 0.2
    assert {t.dtype for t in found["sent"].values()} == {torch.bfloat16}
    saved: dict[str, Tensor] = {}
    for file in (tmp_path / "saved" / "hf").glob("*.safetensors"):
        saved |= load_file(file)
    close({n: t.bfloat16() for n, t in saved.items()}, found["sent"], 0.0)
    before = dict(tiny_model().named_parameters())
    moved = [float((t - before[n].detach()).abs().max()) for n, t in saved.items()]
    assert all(0 < m < 2e-5 for m in moved), "the update is in the masters, whole"


def logits_apart(family: str, folder: Path, options: dict[str, Any]) -> float:
    """Of the greatest logprob difference at every token of the vocabulary, through a checkpoint and back."""
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    model = tiny_model(family)
    backend = MegatronBackend(a_config(backend_options=options), tiny_model(family), device="cpu")
    backend.save(folder)
    ids = torch.arange(VOCABULARY - 1)
    log_p = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    worst = 0.0
    for target in range(VOCABULARY):
        # The logprob of any token after a prefix, whole rows of logits one target at a time.
        row = torch.cat([ids, torch.tensor([target])])
        mask = torch.zeros(VOCABULARY, dtype=torch.bool)
        mask[-1] = True
        (scores,) = backend.logprobs([Packed(row, mask, (VOCABULARY,))])
        worst = max(worst, abs(float(scores.logprobs[-1] - log_p[-1, target])))
    return worst


@pytest.mark.usefixtures("megatron")
@pytest.mark.slow
@pytest.mark.parametrize("shared", ["tensor_parallel", "pipeline_parallel"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_each_family_has_its_own_logits_and_comes_back_bit_for_bit(tmp_path: Path, family: str, shared: str) -> None:
    worst = on_ranks(2, tmp_path / "meet", logits_apart, family, tmp_path / "saved", {shared: 2})
    assert max(worst) < 1e-4
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "hf")
    close(dict(loaded.named_parameters()), dict(tiny_model(family).named_parameters()), 0.0)


def ppo_on_a_stage(model: Path, folder: Path, kind: str) -> tuple[dict[str, Tensor], bool]:
    """Two steps, a checkpoint, one more; then that one again from the checkpoint."""
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    learner = {"backend": "megatron", "backend_options": {"pipeline_parallel": 2}, "ranks": 2}
    config = config_of(model, **GAE, **learner, critic=kind, tokens_per_micro_batch=60)
    trainer = Trainer(config, MegatronBackend(config), Objective(config.learner), MegatronBackend)
    trained(trainer, 2)
    trainer.save(folder)
    torch.distributed.barrier()
    trained(trainer, 1, start=2)
    again = Trainer(config, MegatronBackend(config), Objective(config.learner), MegatronBackend)
    again.load(folder)
    trained(again, 1, start=2)
    found = weights(trainer)
    return found, all(torch.equal(t, found[n]) for n, t in weights(again).items())


@pytest.mark.slow
@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_critic_whose_states_come_out_of_a_pipeline(tmp_path: Path, kind: str) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    _, alone = a_trainer(tmp_path / "model", **GAE, critic=kind)
    trained(alone, 3)
    first, second = on_ranks(2, tmp_path / "meet", ppo_on_a_stage, tmp_path / "model", tmp_path, kind)
    assert differ(weights(alone), first[0]) < 2e-5
    assert first[1]
    assert second[1]
    assert all(torch.equal(second[0][f"head.{n}"], first[0][f"head.{n}"]) for n in ("weight", "bias"))


@pytest.mark.usefixtures("megatron")
def test_a_damaged_checkpoint_is_called_so(tmp_path: Path) -> None:
    on_ranks(1, tmp_path / "meet", chain, None, tmp_path / "saved", 0, 1, {})
    file = tmp_path / "saved" / "megatron" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(AssertionError, match=r"RunError: checkpoint .* is damaged"):
        on_ranks(1, tmp_path / "again", chain, tmp_path / "saved", tmp_path / "never", 1, 2, {})


def waits_for_a_silent_stage() -> float:
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    config = a_config(backend_options={"pipeline_parallel": 2}, collective_s=3.0)
    backend = MegatronBackend(config, tiny_model(), device="cpu")
    began = time.monotonic()
    if torch.distributed.get_rank() == 0:
        time.sleep(8)
        return 0.0
    with pytest.raises(RuntimeError):
        backend.logprobs(parts(0))
    return time.monotonic() - began


@pytest.mark.slow
@pytest.mark.usefixtures("megatron")
def test_a_stage_that_hears_nothing_gives_up(tmp_path: Path) -> None:
    assert 2.5 < on_ranks(2, tmp_path, waits_for_a_silent_stage)[1] < 7


@pytest.mark.usefixtures("megatron")
def test_what_stands_in_for_a_gpu_is_of_the_cpu_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.learner.backends.megatron.cpu import stand_in

    assert torch.cuda.current_device.__module__ == "torch.cuda", "the backend was imported, and nothing was replaced"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="this machine has one"):
        stand_in()
    backends = Path(importlib.import_module("asyncrl.learner.backends").__path__[0])
    top_level = re.compile(r"^(from|import) .*megatron(\.cpu| import .*\bcpu)\b", re.MULTILINE)
    files = list(backends.rglob("*.py"))
    assert backends / "megatron" / "cpu.py" in files
    assert [f.name for f in files if top_level.search(f.read_text())] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: without one Megatron-core runs on CPUs only")
@pytest.mark.usefixtures("megatron")
def test_on_a_gpu(tmp_path: Path) -> None:
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    backend = MegatronBackend(a_config(), tiny_model())
    exact = TorchBackend(tiny_config(), tiny_model(), device="cpu").logprobs(parts(0))
    for mine, theirs in zip(backend.logprobs(parts(0)), exact, strict=True):
        torch.testing.assert_close(mine.logprobs.cpu(), theirs.logprobs, atol=1e-3, rtol=1e-3)
    backend.accumulate(parts(0), lambda i, scores: loss(i, scores))
    assert backend.clip(1.0) > 0
    backend.apply(LR)
    backend.save(tmp_path / "saved")
    backend.load(tmp_path / "saved")


def on_a_gpu(number: int, rendezvous: Path, options: dict[str, Any]) -> dict[str, Any]:
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    config = a_config(backend_options=options, ranks=2)
    DistributedRanks(config, number, rendezvous)
    backend = MegatronBackend(config, tiny_model())
    scores = [s.logprobs.cpu() for s in backend.logprobs(parts(0))]
    backend.accumulate(parts(0), loss)
    norm = backend.clip(1.0)
    backend.apply(LR)
    return {"scores": scores, "norm": norm, "weights": {n: t.cpu().clone() for n, t in backend.weights()}}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL, and no stand-in for them")
@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel": 2, "sequence_parallel": True}, {"pipeline_parallel": 2}, {"distributed_optimizer": True}],
    ids=["tp2", "pp2", "dp2"],
)
def test_on_two_gpus(tmp_path: Path, options: dict[str, Any]) -> None:
    found = on_ranks(2, tmp_path, on_a_gpu, options, joined=False)[0]
    plain = TorchBackend(tiny_config(), tiny_model(), device="cpu")
    for mine, theirs in zip(found["scores"], plain.logprobs(parts(0)), strict=True):
        torch.testing.assert_close(mine, theirs.logprobs, atol=1e-3, rtol=1e-3)
    plain.accumulate(parts(0), loss)
    assert found["norm"] == pytest.approx(plain.clip(1.0), rel=1e-3)
    plain.apply(LR)
    off = [(found["weights"][n] - t).abs().flatten() for n, t in plain.weights()]
    assert torch.cat(off).mean() < LR / 10, "AdamW turns rounding into steps where a gradient is next to nothing"
