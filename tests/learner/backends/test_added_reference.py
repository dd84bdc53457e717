"""A branch that adds `learner.reference_every`: its checkpoint has no reference, which was the run's first model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.config import ModelConfig
from asyncrl.learner.backends.protocol import Backend
from tests.learner.backends.backend_cases import CASES, LR, Case, loss, megatron, parts
from tests.learner.backends.test_backend_conformance import on_ranks_of
from tests.learner.tiny import tiny_config

MEGATRON = pytest.param("megatron-1", marks=pytest.mark.system)


def branched(case: Case, folder: Path) -> list[Tensor]:
    """Logprobs under the reference, in the run, in its branch, and after that has refreshed it; the policy's then."""

    def built(every: int) -> Backend:
        config = tiny_config(kl_coef=0.1, reference_every=every, **dict(case.learner))
        return case.build(config.model_copy(update={"model": ModelConfig(path=str(folder / "model"))}), case.model())

    def scored(of: Backend, *, reference: bool = True) -> Tensor:
        return torch.cat([s.logprobs for s in of.logprobs(parts(0), reference=reference)])

    run = built(0)
    run.accumulate(parts(0), loss)
    run.clip(1.0)
    run.apply(LR)
    run.save(folder / "saved")
    branch = built(2)
    branch.load(folder / "saved")
    found = [scored(run), scored(branch)]
    branch.refresh_reference()
    return [*found, scored(branch), scored(run, reference=False)]


@pytest.mark.parametrize("name", ["torch", "torch-lora", "fsdp2-1", "fsdp2-2-lora", MEGATRON])
def test_a_branch_that_adds_reference_every_begins_with_the_runs_reference(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    if case.build is megatron:
        pytest.importorskip("megatron.core", reason="the extra megatron is not installed")
    case.model().save_pretrained(tmp_path / "model")
    run, branch, refreshed, policy = on_ranks_of(case, tmp_path / "meet", branched, case, tmp_path)[0]
    assert torch.equal(branch, run)
    assert torch.equal(refreshed, policy)
    assert float((refreshed - branch).abs().max()) > 1e-4
