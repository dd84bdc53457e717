"""Who reads a model, what that takes of each rank's memory, and what all ranks hold afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config import Config, ModelConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends.hf import loading
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.scorer import Source, scorer_of
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.model import load_folder
from tests.learner.backends.backend_cases import loss, parts
from tests.learner.kept_ranks import on_kept_ranks
from tests.learner.ranks import on_ranks
from tests.learner.tiny import tiny_config, tiny_model

SPARE = 40 << 20
"""Bytes beside the weights: what is imported or allocated once, and tensors that gloo received ahead, up to 33 MiB on a
busy machine. The bound stays below the model; a rank that loaded it grew by twice its bytes."""


def of(folder: Path, **learner: Any) -> Config:
    return tiny_config(**learner).model_copy(update={"model": ModelConfig(path=str(folder))})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model of 30M weights whose largest tensor is a twelfth of it, a tiny one, and one whose config.json ties the
    head to the embedding while its checkpoint holds another head: transformers warns then, and does not tie them."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=5000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "30m")
    tiny_model().save_pretrained(folder / "tiny")
    tiny_model().save_pretrained(folder / "untied")
    weights = load_file(folder / "untied" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.01
    save_file(weights, folder / "untied" / "model.safetensors", metadata={"format": "pt"})
    return folder / "30m", folder / "tiny", folder / "untied"


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def grown(big: Path, tiny: Path) -> int:
    """Bytes by which building a backend raised this process's memory, at its peak."""
    Fsdp2Backend(of(tiny), device="cpu")  # imports, and what torch allocates once
    before = resident("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak again
    Fsdp2Backend(of(big), device="cpu")
    return resident("VmHWM:") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.system), 4])
@pytest.mark.system
def test_a_rank_holds_its_share_and_a_tensor_and_never_the_model(
    models: tuple[Path, Path, Path], tmp_path: Path, ranks: int
) -> None:
    sizes = [p.nbytes for p in load_folder(models[0], torch.float32, "the model").parameters()]
    first, *others = on_ranks(ranks, tmp_path, grown, *models[:2])
    assert first > sum(sizes) / 2, "rank 0 reads it"
    for each in others:
        assert each < sum(sizes) / ranks + 2 * max(sizes) + SPARE, f"{each >> 20} MiB of {sum(sizes) >> 20}"


def tensors(scorer: Any) -> dict[str, Tensor]:
    """Parameters, whole, and buffers, under each of their names."""
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in loading._tensors(scorer)
    }


def built(folder: Path, learner: dict[str, Any]) -> dict[str, Any]:
    """What the ranks hold, of a model that only rank 0 can read."""
    config = of(folder if dist.get_rank() == 0 else folder.parent / "nowhere", **learner)
    backend = Fsdp2Backend(config, device="cpu")
    kept = len({id(p) for _, p in backend._scorer.named_parameters(remove_duplicate=False)})
    found = {"tensors": tensors(backend._scorer), "parameters": kept}
    found["sent"] = {n: t.clone() for n, t in backend.weights()}
    found["logprobs"] = [s.logprobs for s in backend.logprobs(parts(0))]
    found["reference"] = [s.logprobs for s in backend.logprobs(parts(0), reference=True)]
    backend.accumulate(parts(0), loss)
    found["norm"] = backend.clip(1.0)
    return found


@pytest.mark.parametrize(
    ("ranks", "learner", "model"),
    [(2, {}, 1), (3, {"cpu_offload": True, "lora": {"r": 3}}, 1), (2, {}, 2)],
    ids=["all", "lora-offload", "not-tied-as-its-config-says"],
)
def test_ranks_hold_what_one_process_reads_bit_for_bit(
    models: tuple[Path, Path, Path], ranks: int, learner: dict[str, Any], model: int
) -> None:
    learner = {"kl_coef": 0.1} | learner
    alone = TorchBackend(of(models[model], **{n: x for n, x in learner.items() if n != "cpu_offload"}), device="cpu")
    mine = tensors(alone._scorer)
    assert any("inv_freq" in name for name in mine), "rotary frequencies are in no checkpoint"
    assert torch.equal(mine["model.model.embed_tokens.weight"], mine["model.lm_head.weight"]) == (model == 1)
    scores = alone.logprobs(parts(0))
    alone.accumulate(parts(0), loss)
    norm = alone.clip(1.0)
    for rank, found in enumerate(on_kept_ranks(ranks, built, models[model], learner)):
        assert found["tensors"].keys() == mine.keys()
        assert all(torch.equal(x, mine[name]) for name, x in found["tensors"].items())
        assert found["parameters"] == len(list(alone._scorer.parameters())), "tied weights are tied"
        sent = dict(alone.weights()) if rank == 0 else {}
        assert found["sent"].keys() == sent.keys()
        assert all(torch.equal(x, sent[name]) for name, x in found["sent"].items())
        for kind in ("logprobs", "reference"):
            for x, y in zip(found[kind], scores, strict=True):
                torch.testing.assert_close(x, y.logprobs, atol=1e-6, rtol=1e-6)
        assert found["norm"] == pytest.approx(norm, rel=1e-4)


def refused(folder: Path, readable: Path, learner: dict[str, Any]) -> str:
    """Why a model was refused at this rank; the other ranks than 0 could read theirs."""
    try:
        Fsdp2Backend(of(readable if dist.get_rank() else folder, **learner), device="cpu")
    except ConfigError as error:
        return str(error)
    return ""


def test_what_rank_0_refuses_every_rank_refuses_in_the_same_words(
    models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((models[1] / "config.json").read_text())
    for folder, learner, words in (
        (tmp_path / "nowhere", {}, "there is no such folder"),
        (tmp_path / "empty", {}, "holds no causal language model"),
        (models[1], {"lora": {"r": 3, "target_modules": ["nothing"]}}, "learner.lora.target_modules"),
        (models[1], {"teacher": {"path": str(tmp_path / "nowhere")}}, "learner.teacher.path"),
    ):
        first, *others = on_kept_ranks(3, refused, folder, models[1], learner)
        assert words in first
        assert others == [first] * 2


def broken(folder: Path) -> str:
    """How building ends at this rank when rank 0 cannot read for another reason than the configuration."""

    def fails() -> Source:
        raise OSError("the disk is gone")

    backend = Fsdp2Backend(of(folder), device="cpu")
    try:
        backend._build(of(folder), fails)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_any_other_failure_of_rank_0_ends_every_rank(models: tuple[Path, Path, Path]) -> None:
    first, other = on_kept_ranks(2, broken, models[1])
    assert first == "OSError: the disk is gone"
    assert other == "RuntimeError: rank 0 of the learner could not load the model: the disk is gone"


def told_otherwise() -> tuple[str, bool]:
    """What a rank says to a model whose adapters rank 0 has not; and whether it holds no data of one that agrees."""
    source = Source(tiny_model())
    scorer = scorer_of(tiny_config(), source)
    told = {
        "config": json.loads(source.model.config.to_json_string(use_diff=False)),
        "digest": "",
        "tensors": loading._described(scorer),
        "ties": loading._ties(scorer),
    }
    made, held = loading._as_told(told, lambda s: scorer_of(tiny_config(), s))
    empty = not held and all(x.is_meta for _, x in loading._tensors(made))
    try:
        loading._as_told(told, lambda s: scorer_of(tiny_config(lora={"r": 2}), s))
    except RunError as error:
        return str(error), empty
    return "", empty


def test_a_rank_that_makes_another_model_says_which_tensor_differs() -> None:
    words, empty = on_kept_ranks(1, told_otherwise)[0]
    assert empty
    assert "different models: model.model.layers.0.self_attn.q_proj" in words
    assert "Install the same version of transformers" in words
