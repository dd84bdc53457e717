"""A quantized engine: a correction is required, and the mismatch is announced."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.config.rules import warnings


def quantized(**learner: Any) -> Config:
    options = {"args": {"quantization": "fp8"}}
    return Config.model_validate({"actors": {"engine": "vllm", "engine_options": options}, "learner": learner})


def test_a_quantized_engine_is_corrected_and_announced() -> None:
    said = [w for w in warnings(quantized()) if "quantization is fp8" in w]
    assert len(said) == 1
    assert "mismatch KL" in said[0]
    assert not any("quantization" in w for w in warnings(Config()))


@pytest.mark.parametrize("learner", [{"corrections": []}, {"corrections": [{"name": "none"}]}])
def test_without_a_correction_it_is_refused_even_for_fresh_data(learner: dict[str, Any]) -> None:
    fresh = {"buffer": {"max_staleness": 0}}
    options = {"engine": "vllm", "engine_options": {"args": {"quantization": "fp8"}}}
    with pytest.raises(ValueError, match=r"quantization is fp8 and no importance correction.*\[\{name: tis\}\]"):
        Config.model_validate({"actors": options, "learner": learner, **fresh})
    Config.model_validate({"actors": options, "learner": learner | {"unsafe": True}, **fresh})
    Config.model_validate({"learner": learner, **fresh})
