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

from asyncrl.actors.engines.protocol import Engine, EngineDied, Generation, Sampling
from asyncrl.actors.engines.vllm.engine import VLLMEngine
from asyncrl.actors.engines.vllm.settings import VLLMSettings
from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber
from tests.actors.engines.engine_conformance import *  # noqa: F403
from tests.actors.engines.engine_conformance import (
    MAX_TOKENS,
    VOCAB,
    Shared,
    Subject,
    all_of,
    closed_under,
    judge,
    play,
    prompts,
    sampling,
    tiny,
)  # fmt: skip

pytestmark = pytest.mark.timeout(300)
torch.set_num_threads(1)


def settings(folder: Path, tied: bool = True, **args: Any) -> VLLMSettings:
    tiny(0, tied).save_pretrained(folder)
    return VLLMSettings(folder, "float32", slots=64, max_tokens=MAX_TOKENS, kv_gb=0.25, args=args)


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


def test_truncated_sampling_reports_the_probability_within_what_is_left(subject: Subject) -> None:
    asked = [([5, 6], Sampling(30, 0.8, (), 1, top_k=1)), ([5, 6], Sampling(30, 0.8, (), 1, top_p=0.5))]
    asked.append(([5, 6], sampling(1, n=30)))
    single, nucleus, whole = play(subject, lambda e: all_of(e, asked))
    np.testing.assert_allclose(single.logprobs, 0.0, atol=1e-6)
    np.testing.assert_allclose(whole.logprobs, judge(subject.model, [5, 6], whole.token_ids, 1.0), atol=1e-4)
    ids = [5, 6, *nucleus.token_ids.tolist()]
    with torch.no_grad():
        probabilities = torch.softmax(subject.model(torch.tensor([ids])).logits[0, 1:-1] / 0.8, -1)
    for p, token, logprob in zip(probabilities, nucleus.token_ids, nucleus.logprobs, strict=True):
        ranked, order = p.sort(descending=True)
        kept = int((ranked.cumsum(0) - ranked < 0.5).sum())
        assert token in order[:kept]
        assert abs(float(torch.log(p[int(token)] / ranked[:kept].sum())) - logprob) < 1e-4


def test_a_request_that_is_aborted_before_it_was_sent_has_nothing(subject: Subject) -> None:
    async def scenario(engine: Engine) -> Generation:
        await engine.pause(True)
        waiting = asyncio.ensure_future(engine.generate("waits", [1], sampling()))
        await asyncio.sleep(0)
        await engine.abort("waits")
        await engine.resume()
        return await waiting

    out = play(subject, scenario)
    assert (out.stop_reason, len(out.token_ids), len(out.logprobs)) == ("abort", 0, 0)


def leftovers() -> list[psutil.Process]:
    """The engines' processes that this one has, now."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if "resource_tracker" not in " ".join(p.cmdline())]


# Here it is the last test of the engine that they share: pytest goes by the place of the name.
del test_closing_ends_what_runs  # noqa: F821


def test_closing_ends_what_runs(running: Subject) -> None:
    engine: Any = running.make()

    async def scenario(_: Engine) -> list[psutil.Process]:
        started = leftovers()
        await closed_under(engine, 200)
        await engine._engine.close()
        return started

    started = play(running, scenario)
    assert started
    assert not psutil.wait_procs(started, timeout=5)[1]


def test_an_engine_of_its_own(tmp_path: Path) -> None:
    """What needs one, in one test, because it takes seconds to start: a model whose head is not tied; weights from the
    published file, and from the mapping when the publisher has removed that already; too little KV cache; the death of
    the engine core."""
    engine = VLLMEngine(settings(tmp_path / "model", tied=False, num_gpu_blocks_override=24))
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
        outs += await all_of(engine, [(prompt, sampling(i, n=150)) for i in range(16)])
        assert engine.load_stats()["preempted"] > 0
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
    for i, out in enumerate(outs):
        assert set(out.versions.tolist()) == {1 if i == 0 else 2}
        model = subject.other if i == 0 else subject.model
        np.testing.assert_allclose(out.logprobs, judge(model, prompt, out.token_ids, 1.0), atol=1e-4)
    assert not leftovers()


ACTOR = """
import asyncio
from pathlib import Path

from asyncrl.actors.engines.protocol import Sampling
from asyncrl.actors.engines.vllm.engine import VLLMEngine
from asyncrl.actors.engines.vllm.settings import VLLMSettings


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
