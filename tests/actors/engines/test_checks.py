from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.actors.engines.checks import Fit, check_fit, checkpoint_shapes
from asyncrl.actors.engines.protocol import WeightsMismatch
from asyncrl.errors import ConfigError
from tests.actors.engines.engine_conformance import HeldWeights

SHAPES = {"a": (2, 3), "head": (4,)}


def test_what_fits_is_accepted_with_or_without_the_tied_head() -> None:
    check_fit({"a": torch.zeros(2, 3), "head": torch.zeros(4)}, SHAPES, (), "v1")
    check_fit({"a": torch.zeros(2, 3)}, SHAPES, ("head",), "v1")
    check_fit({"a": torch.zeros(2, 3), "head": torch.zeros(4)}, {"a": (2, 3)}, ("head",), "v1")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": torch.zeros(2, 3)}, "1 tensors are missing, for instance head"),
        ({"a": torch.zeros(2, 3), "head": torch.zeros(4), "b": torch.zeros(1)}, "unknown, for instance b"),
        ({"a": torch.zeros(2, 3), "head": torch.zeros(5)}, r"head has shape \[5\], the model's has \[4\]"),
        ({"a": torch.full((2, 3), torch.inf), "head": torch.zeros(4)}, "a holds values that are not finite"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(WeightsMismatch, match=says):
        check_fit(given, SHAPES, (), "v1")


def test_the_same_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    weights = HeldWeights(torch.nn.Linear(3, 2), 1)
    monkeypatch.setattr(torch, "isfinite", lambda t: read.append(t) or torch.ones(1, dtype=torch.bool))
    fit = Fit({"weight": (2, 3), "bias": (2,)}, ())
    assert fit.tensors(weights) is fit.tensors(weights)
    assert len(read) == 2
    fit.forget()
    assert set(fit.tensors(weights)) == {"weight", "bias"}
    assert len(read) == 4
    with pytest.raises(WeightsMismatch):
        Fit({"weight": (2, 2), "bias": (2,)}, ()).tensors(weights)


def test_shapes_come_from_the_headers_of_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors"):
        checkpoint_shapes(tmp_path)
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors")
    save_file({"head": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    assert checkpoint_shapes(tmp_path) == SHAPES
