"""Compiled layers against plain ones: what they score and what they learn. Compiling takes 10 to 20 s of a core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.hf.torch import TorchBackend
from tests.learner.backends.hf.test_torch import one_update, pack_rows, rows
from tests.learner.ranks import on_ranks
from tests.learner.tiny import tiny_config, tiny_model

DEADLINE_S = 400.0


def learned(learner: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor], float, int]:
    """Scores before and after two updates, the weights, the norm of a gradient, and graphs compiled."""
    from torch._dynamo.utils import counters

    backend = TorchBackend(tiny_config(**learner), tiny_model(), device="cpu")
    parts = [pack_rows(rows()[:3]), pack_rows(rows()[3:4]), pack_rows(rows()[4:])]
    found = [s.logprobs for s in backend.logprobs(parts)]
    for seed in range(2):
        one_update(backend, seed)
    found += [s.logprobs for s in backend.logprobs(parts)]
    backend.accumulate(parts, lambda _, scores: scores.logprobs.sum())
    norm = backend.clip(1.0)
    return found, {n: t.clone() for n, t in backend.weights()}, norm, counters["stats"]["unique_graphs"]


def the_same(compiled: Any, plain: Any) -> None:
    for a, b in zip(compiled[0], plain[0], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    for name, tensor in plain[1].items():
        torch.testing.assert_close(compiled[1][name], tensor, atol=1e-5, rtol=1e-5)
    assert compiled[2] == pytest.approx(plain[2], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    "learner", [{}, {"activation_checkpointing": True}, {"lora": {"r": 4}}], ids=["plain", "checkpointing", "lora"]
)
def test_compiled_layers_score_and_learn_as_plain_ones(tmp_path: Path, learner: dict[str, Any]) -> None:
    compiled = on_ranks(1, tmp_path, learned, learner | {"compile": True}, deadline_s=DEADLINE_S)[0]
    the_same(compiled, learned(learner))
    assert 0 < compiled[3] <= 12, "no graph of its own for every number of tokens, rows or layers"


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(ConfigError, match=r"learner\.compile is true, and there is no C\+\+ compiler.*/nowhere/c\+\+"):
        TorchBackend(tiny_config(compile=True), tiny_model(), device="cpu")


@pytest.mark.slow
def test_a_compiler_that_compiles_nothing_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho this is no compiler >&2\nexit 1\n")
    broken.chmod(0o755)
    code = (
        "from tests.learner.backends.hf.test_compile import *\n"
        "try: TorchBackend(tiny_config(compile=True), tiny_model(), device='cpu')\n"
        "except ConfigError as error: print(error)"
    )
    environment = {"CXX": str(broken), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert "learner.compile is true, and the layers of a Qwen3ForCausalLM cannot be compiled here" in done.stdout


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_other_backends_refuse(backend: str) -> None:
    with pytest.raises(ValueError, match=rf"learner\.compile is true and learner\.backend {backend}"):
        Config.model_validate({"learner": {"compile": True, "backend": backend}})
