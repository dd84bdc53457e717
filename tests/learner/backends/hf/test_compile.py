"""Compiled layers against plain ones: what they score and what they learn. Compiling takes 10 to 20 s of a core."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.torch import TorchBackend
from tests.learner.backends.backend_cases import LR, close, loss, parts, plain_gradients, sharded_gradients
from tests.learner.backends.hf.test_torch import one_update, pack_rows, rows
from tests.learner.kept_ranks import on_kept_ranks
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


def sharded(learner: dict[str, Any], compiler: str, layers: int = 2) -> dict[str, Any]:
    """Scores, the whole gradient of three parts, weights after an update, and graphs compiled, of one rank.
    `compiler`: torch's name of it; `aot_eager` traces forward and backward as inductor does, and builds no code."""
    from torch._dynamo.utils import counters

    compiling = torch.compile
    torch.compile = partial(compiling, backend=compiler)
    try:
        backend = Fsdp2Backend(tiny_config(**learner), tiny_model(layers=layers), device="cpu")
        return gradient_and_update(backend, sharded_gradients) | {"graphs": counters["stats"]["unique_graphs"]}
    finally:
        torch.compile = compiling


def gradient_and_update(backend: TorchBackend, gradients: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"scores": [s.logprobs for s in backend.logprobs(parts(0))]}
    backend.accumulate(parts(0), loss)
    found["gradients"] = gradients(backend)
    backend.clip(1.0)
    backend.apply(LR)
    return found | {"weights": {n: t.clone() for n, t in backend.weights()}}


def is_one_process(found: dict[str, Any], layers: int = 2, tolerance: float = 1e-6) -> None:
    """To `tolerance` of the largest gradient, under the names of the checkpoint."""
    model = tiny_model(layers=layers)
    alone = gradient_and_update(TorchBackend(tiny_config(), model, device="cpu"), plain_gradients)
    for a, b in zip(found["scores"], alone["scores"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    scale = max(float(g.abs().max()) for g in alone["gradients"].values())
    close(
        {n: g / scale for n, g in found["gradients"].items()},
        {n: g / scale for n, g in alone["gradients"].items()},
        tolerance,
    )
    assert found["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        # AdamW's first step is the sign of a gradient: where that is rounding, all of it may differ.
        torch.testing.assert_close(found["weights"][name], weight, atol=2 * LR, rtol=0)


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_two_ranks_learn_as_one_process(checkpointing: str, offload: bool) -> None:
    learner = {"activation_checkpointing": checkpointing, "cpu_offload": offload}
    for found in on_kept_ranks(2, sharded, learner, "eager")[:1]:
        is_one_process(found)
        assert found["graphs"] == 0


SHARDED = [
    pytest.param("aot_eager", "full", True, 3, marks=[pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]),
    *(
        pytest.param(
            "inductor", checkpointing, offload, layers, marks=[pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]
        )
        for checkpointing, offload, layers in (
            ("none", False, 2),
            ("full", False, 2),
            ("none", True, 2),
            ("full", True, 10),
        )
    ),
]


@pytest.mark.parametrize(("compiler", "checkpointing", "offload", "layers"), SHARDED)
def test_two_ranks_with_compiled_layers_learn_as_one_process(
    tmp_path: Path, compiler: str, checkpointing: str, offload: bool, layers: int
) -> None:
    learner = {"compile": True, "activation_checkpointing": checkpointing, "cpu_offload": offload}
    for found in on_ranks(2, tmp_path, sharded, learner, compiler, layers, deadline_s=DEADLINE_S)[:1]:
        # Inductor's fused kernels round otherwise: 1.2e-6 with 2 layers and 3.0e-6 with 10 were measured, where the
        # one process in float32 is itself 2.4e-6 and 2.2e-6 away from the same in float64.
        is_one_process(found, layers, 1e-6 if compiler == "aot_eager" else 2e-6 if layers == 2 else 5e-6)
        assert 0 < found["graphs"] <= 12, "no graph of its own for every number of tokens, rows or layers"


def test_megatron_refuses() -> None:
    with pytest.raises(ValueError, match=r"learner\.compile is true and learner\.backend megatron"):
        Config.model_validate({"learner": {"compile": True, "backend": "megatron"}})
