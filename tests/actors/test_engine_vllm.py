from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
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

from asyncrl.actors.engines.protocol import Engine, EngineDied, Generation
from asyncrl.actors.engines.vllm import VLLMEngine
from asyncrl.actors.engines.vllm_settings import VLLMSettings
from asyncrl.weights.shm import ShmPublisher, ShmSubscriber

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


def leftovers() -> list[psutil.Process]:
    """The engines' processes that this one has, now."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if "resource_tracker" not in " ".join(p.cmdline())]


def test_closing_ends_what_runs(running: Subject) -> None:
    """The last test of the shared engine."""
    engine: Any = running.make()

    async def scenario(_: Engine) -> list[psutil.Process]:
        begun = [asyncio.ensure_future(engine.generate(f"r{i}", [1], sampling(n=MAX_TOKENS))) for i in range(200)]
        await engine.pause(True)
        started = leftovers()
        await engine._engine.close()
        await asyncio.wait(begun, timeout=10)
        assert {type(r.exception()) for r in begun} == {EngineDied}
        with pytest.raises(EngineDied, match="was closed"):
            await engine.generate("late", [1], sampling())
        await engine._engine.close()
        return started

    started = play(running, scenario)
    assert started
    assert not psutil.wait_procs(started, timeout=5)[1]
    assert not engine._engine._folder.exists()


def test_published_weights_of_a_model_with_a_head_of_its_own_and_the_death_of_the_core(tmp_path: Path) -> None:
    """From the published file, and from the mapping when the publisher has removed that already."""
    engine = VLLMEngine(settings(tmp_path / "model", tied=False))
    subject = Subject(lambda: engine, tiny(0, tied=False), tiny(1, tied=False), VOCAB, MAX_TOKENS)
    prompt = prompts(subject, 1)[0]
    publisher = ShmPublisher(tmp_path / "weights", keep=1)

    async def scenario(_: Engine) -> list[Generation]:
        outs = []
        for version, model in enumerate((subject.other, subject.model), 1):
            publisher.publish(0, version, model.named_parameters())
            weights = ShmSubscriber(tmp_path / "weights").open()
            if version == 2:
                weights.path.unlink()
            await engine.pause(True)
            await engine.load(weights)
            await engine.resume()
            weights.close()
            outs.append(await engine.generate(f"after{version}", prompt, sampling(version)))
        begun = [asyncio.ensure_future(engine.generate(f"r{i}", [1], sampling(n=MAX_TOKENS))) for i in range(100)]
        await asyncio.sleep(0.1)
        for process in leftovers():
            process.kill()
        await asyncio.wait(begun, timeout=20)
        assert EngineDied in {type(r.exception()) for r in begun}
        for command in (engine.generate("late", [1], sampling()), engine.pause(True)):
            with pytest.raises(EngineDied):
                await command
        return outs

    outs = play(subject, scenario)
    for version, (model, out) in enumerate(zip((subject.other, subject.model), outs, strict=True), 1):
        assert set(out.versions.tolist()) == {version}
        np.testing.assert_allclose(out.logprobs, judge(model, prompt, out.token_ids, 1.0), atol=1e-4)
    assert not leftovers()


ACTOR = """
import asyncio
from pathlib import Path

from asyncrl.actors.engines.protocol import Sampling
from asyncrl.actors.engines.vllm import VLLMEngine
from asyncrl.actors.engines.vllm_settings import VLLMSettings


async def main():
    engine = VLLMEngine(VLLMSettings(Path("model"), "float32", slots=8, max_tokens=200, kv_gb=0.1))
    await engine.start()
    print("started", flush=True)
    while True:
        await engine.generate("long", [1], Sampling(10_000, 1.0, (), 0))


if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_killed_actor_leaves_no_process(tmp_path: Path) -> None:
    settings(tmp_path / "model")
    (tmp_path / "actor.py").write_text(ACTOR)
    command = [sys.executable, "actor.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as actor:
        try:
            assert actor.stdout is not None
            assert "started\n" in iter(actor.stdout.readline, "")
            left = psutil.Process(actor.pid).children(recursive=True)
        finally:
            actor.kill()
    assert left
    assert not psutil.wait_procs(left, timeout=10)[1]
