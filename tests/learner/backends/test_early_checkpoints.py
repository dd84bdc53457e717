"""A checkpoint that is taken before the first update, in a critic's warm-up say."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from asyncrl.learner.backends.protocol import Backend
from tests.learner.backends.backend_cases import CASES, LR, Case, close, loss, megatron, parts
from tests.learner.backends.test_backend_conformance import on_ranks_of
from tests.learner.tiny import tiny_config

MEGATRON = pytest.param("megatron-1", marks=pytest.mark.system)


def updated(case: Case, folder: Path) -> list[dict[str, Tensor]]:
    """The weights after one update: without a checkpoint, after one was taken, and from that one."""
    config = tiny_config(**dict(case.learner))

    def updates(backend: Backend) -> dict[str, Tensor]:
        backend.accumulate(parts(0), loss)
        backend.clip(1.0)
        backend.apply(LR)
        return {n: t.clone() for n, t in backend.weights()}

    found = [updates(case.build(config, case.model()))]
    saved = case.build(config, case.model())
    saved.save(folder)
    found.append(updates(saved))
    loaded = case.another(config)
    loaded.load(folder)
    return [*found, updates(loaded)]


@pytest.mark.parametrize("name", ["torch", "fsdp2-1", "fsdp2-2-lora", MEGATRON])
def test_the_first_update_is_the_same_whether_or_not_a_checkpoint_was_taken(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    if case.build is megatron:
        pytest.importorskip("megatron.core", reason="the extra megatron is not installed")
    found = on_ranks_of(case, tmp_path / "meet", updated, case, tmp_path)
    without, after, resumed = found[0]
    close(after, without, 0.0)
    close(resumed, without, 0.0)
