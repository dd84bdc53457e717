from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here (`make test-vllm` runs these tests)", allow_module_level=True)

from engine_conformance import *  # noqa: F403
from engine_conformance import HeldWeights, Subject, judge, play, prompts, sampling
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.actors.engines.protocol import Engine, Generation
from asyncrl.actors.engines.vllm import VLLMEngine
from asyncrl.actors.engines.vllm_settings import VLLMSettings

pytestmark = pytest.mark.timeout(300)

VOCAB, MAX_TOKENS = 64, 256
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": MAX_TOKENS, "initializer_range": 0.3,
}  # fmt: skip


def tiny(seed: int, tied: bool = True) -> Any:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)).eval()


class Shared:
    """One running engine for all scenarios: starting it puts back the first weights and begins to count anew."""

    def __init__(self, engine: VLLMEngine, first: Any) -> None:
        self._engine, self._first = engine, first
        self._started = False
        self._before: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        if not self._started:
            await self._engine.start()
            self._started = True
        if self._engine.held != (0, 0):
            await self._engine.pause(True)
            await self._engine.load(HeldWeights(self._first, 0))
            await self._engine.resume()
        self._before = dict(self._engine.load_stats())

    async def close(self) -> None:
        assert self._engine.load_stats()["running"] == 0

    def load_stats(self) -> dict[str, float]:
        now = self._engine.load_stats()
        return {name: now[name] - self._before[name] if name == "generated" else now[name] for name in now}


def settings(folder: Path, tied: bool = True) -> VLLMSettings:
    tiny(0, tied).save_pretrained(folder)
    return VLLMSettings(model=folder, dtype="float32", slots=64, max_tokens=MAX_TOKENS, kv_gb=0.25)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    engine = VLLMEngine(settings(tmp_path_factory.mktemp("model")))
    shared = Shared(engine, tiny(0))
    with asyncio.Runner() as runner:
        yield Subject(lambda: shared, tiny(0), tiny(1), VOCAB, MAX_TOKENS, runner)
        runner.run(engine.close())


@pytest.fixture(params=["recorded", "vLLM's own"])
def subject(running: Subject, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The logprobs that asyncrl's sampler records, and those that vLLM itself reports, as it does on a GPU."""
    shared: Any = running.make()
    if request.param != "recorded":
        play(running, lambda e: e.generate("first", [1], sampling(n=1)))
        monkeypatch.setattr(shared._engine, "_board", None)
    return running
