"""Whether a run fits its GPUs: the shipped configs, the verdict, and what a start does with it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen3Config, T5Config

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import engine_memory as memory_of_engines
from asyncrl.launch.placement import machine, report
from asyncrl.launch.placement.cards import CARDS, Card, card, card_here, cards, smallest
from asyncrl.launch.placement.engine_memory import bytes_of_token, memory_of_engine
from asyncrl.launch.placement.memory import REFUSE, WARN, Budget, budget, details, refuse_or_warn
from asyncrl.launch.placement.plan import on_this_machine
from asyncrl.learner.budget import memory
from tests.learner.budget.test_fake_pass import OF_30M, OF_EXPERTS, qwen3

pytestmark = pytest.mark.system

CONFIGS = sorted(p for p in (Path(__file__).parents[3] / "configs").glob("*.yaml") if "engine: vllm" in p.read_text())
SHAPES: dict[str, Qwen3Config] = {
    "Qwen/Qwen3-0.6B": qwen3(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8,
    ),
    "Qwen/Qwen3-4B": qwen3(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "Qwen/Qwen3-8B": qwen3(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""As the models' config.json have them."""


def of_file(path: Path) -> tuple[Config, Budget]:
    """The budget of a shipped config on the card that its comment names."""
    asked = Config.load(path, [])
    match = re.search(r"--dry-run --memory --gpu (\S+)", path.read_text())
    assert match, f"{path} does not say for which card it is"
    named, count = cards(match[1])
    assert count is not None
    return asked, budget(asked, SHAPES[asked.model.path], named, on_this_machine(asked, count))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_fits_the_card_that_its_comment_names(path: Path) -> None:
    """F6: three of four did not."""
    asked, found = of_file(path)
    assert found.share <= WARN, found.verdict
    assert found.engine is not None
    assert found.engine.rows >= 16, found.engine
    assert refuse_or_warn(asked, found) == []


def test_there_are_shipped_configs_for_gpus() -> None:
    assert len(CONFIGS) >= 4


def small(**sections: Any) -> Config:
    given: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "env": {"max_tokens": 512},
        "actors": {"engine": "vllm", "engine_options": {"gpu_memory": 0.4}},
        "learner": {"tokens_per_micro_batch": 1024},
    }
    return Config.model_validate({k: {**given.get(k, {}), **sections.get(k, {})} for k in given | sections})


def test_the_verdict_names_the_gpu_its_processes_and_what_to_change() -> None:
    asked = small()
    tight = Card("tiny", 1000 << 20)
    found = budget(asked, OF_30M, tight, on_this_machine(asked, 1))
    assert found.fullest == "learner and actor-0"
    assert found.engine is not None
    assert found.share == pytest.approx((found.engine.needed + found.learner.total) / tight.memory)
    assert found.share > REFUSE
    said = " ".join(details(asked, found))
    for words in (
        "learner and actor-0 does not fit", "learner.activation_checkpointing full needs",
        "lower learner.tokens_per_micro_batch (1024)", "give the engine GPUs of its own", "TFLOP",
    ):  # fmt: skip
        assert words in said


def test_a_bound_of_its_own_counts_for_the_learner() -> None:
    asked = small(learner={"gpu_memory": 0.01})
    found = budget(asked, OF_30M, CARDS["h100-80gb"], on_this_machine(asked, 2))
    assert found.fullest.startswith("learner, which may use learner.gpu_memory 0.01")


def test_a_start_refuses_warns_or_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine, "has_driver", lambda: True)
    monkeypatch.setattr(memory, "model_config", lambda config: OF_30M)
    monkeypatch.setattr(report, "card_here", lambda: Card("tiny", 1000 << 20))
    monkeypatch.setattr(memory_of_engines, "WORK", 0.0)
    with pytest.raises(ConfigError, match=r"does not fit: .* of tiny .*launch\.memory_check warn starts anyway"):
        report.before_start(small())
    warned = report.before_start(small(launch={"memory_check": "warn"}))
    assert warned[-1].startswith("warning: learner and actor-0 does not fit")
    assert len(report.before_start(small(launch={"memory_check": "off"}))) == 4
    monkeypatch.setattr(report, "card_here", lambda: CARDS["h100-80gb"])
    fits = report.before_start(small())
    assert not any("warning" in line for line in fits)
    assert "GiB" in fits[2]
    assert "GiB" in fits[3]


def eager() -> PretrainedConfig:
    """A mixture of experts that loops over those that any token meets: only data tell which."""
    shapes = copy.deepcopy(OF_EXPERTS)
    shapes._experts_implementation = "eager"
    return shapes


@pytest.mark.parametrize("shapes", [T5Config(), PretrainedConfig(), eager()], ids=["T5", "none", "eager MoE"])
def test_a_model_that_cannot_be_computed_without_data_starts_all_the_same(
    shapes: PretrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine, "has_driver", lambda: True)
    monkeypatch.setattr(memory, "model_config", lambda config: shapes)
    monkeypatch.setattr(report, "card_here", lambda: CARDS["h100-80gb"])
    shown = report.before_start(small())
    (said,) = [line for line in shown if line.startswith("memory is not checked: ")]
    assert f"a {type(shapes).__name__}, and its training step cannot be computed without data (" in said
    with pytest.raises(ConfigError, match="cannot be computed without data"):
        report.planned(small(), memory=True)


def test_an_engine_without_room_for_one_row_is_refused() -> None:
    asked = small(actors={"engine_options": {"gpu_memory": 0.01}})
    found = budget(asked, OF_30M, CARDS["l4-24gb"], on_this_machine(asked, 2))
    with pytest.raises(ConfigError, match=r"gives the engine 0\.2 GiB .* one row of env\.max_tokens need"):
        refuse_or_warn(asked, found)


def test_an_engine_s_cache_is_counted_by_hand() -> None:
    asked = small(env={"max_tokens": 8192}, actors={"engine_options": {"gpu_memory": 0.5, "tensor_parallel": 2}})
    shape = SHAPES["Qwen/Qwen3-8B"]
    assert bytes_of_token(shape, 2) == 2 * 36 * 8 * 128 * 2
    found = memory_of_engine(asked, shape, 8_190_735_360, 80 << 30)
    assert found.taken == 40 << 30
    left = (40 << 30) - 8_190_735_360 - 1.5 * (1 << 30)
    assert found.rows == left // (8192 * 2 * 36 * 8 * 128)


def test_cards_by_name_by_size_and_as_the_driver_reports_them() -> None:
    assert card("H100_80GB").memory > 79 << 30
    assert card("48gb").memory == int(48 * 0.97 * 2**30)
    assert cards("2x24gb")[1] == 2
    with pytest.raises(ConfigError, match=r"--gpu is 'h1000': expected one of a10-24gb, .*48gb"):
        card("h1000")
    assert smallest("0, GPU-7f, a, 10\n1, GPU-3a, b, 5\n") == Card("b", 5 << 20)
    assert smallest("0, GPU-7f, [N/A], [N/A]\n") is None


OF_TWO = "0, GPU-3a11, display, 2048\n1, GPU-7f22, NVIDIA H100, 81559\n"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "display"),
        ("1", "NVIDIA H100"),
        ("GPU-7f", "NVIDIA H100"),
        (" 1, 0 ", "display"),
        ("", None),
        ("7", None),
        ("MIG-7f22", None),
    ],
)
def test_only_the_gpus_that_the_run_sees_are_asked_for_their_memory(
    visible: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "nvidia-smi"
    asked = "--query-gpu=index,uuid,name,memory.total"
    fake.write_text(f'#!/bin/sh\n[ "$1" = "{asked}" ] && cat <<END || echo "display, 2048"\n{OF_TWO}END\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = card_here()
    assert (found and found.name) == expected


def test_the_dry_run_needs_a_card_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--memory: this machine has no GPU to compare with"):
        report.planned(small(), memory=True)
    with pytest.raises(ConfigError, match="--gpu is 'h100-80gb' without --memory"):
        report.planned(small(), gpu="h100-80gb")
    monkeypatch.setattr(memory, "model_config", lambda config: OF_30M)
    shown = report.planned(small(), memory=True, gpu="1xh100-80gb")
    assert shown[0] == "placement on a machine with 1 GPUs:"
    assert shown[-1].startswith("learner and actor-0 fits")
