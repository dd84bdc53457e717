"""Part 2: vLLM as asyncrl runs it.

    bare      vLLM's own `LLM.generate`, with the same settings: without logprobs, and with `logprobs=0`
    ours      the same requests through asyncrl's engine, which returns the logprob of every sampled token
    update    new weights from this process's GPU while requests run: how long generation stands still, which version
              sampled each token
    exact     the returned logprobs against a transformers forward pass under the version that sampled the token, and,
              so that the check is known to discriminate, under the other one

Without vLLM, `--tiny` runs update and exact with asyncrl's engine for CPUs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.actors.engines.protocol import Engine, Generation, Sampling
from asyncrl.weights.protocol import Publisher, Subscriber
from scripts.gpu import models
from scripts.gpu.report import Report, end_of

GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
"""Without torch.compile vLLM starts a minute sooner, and generates as fast within a tenth."""
STARTED_S = 150.0


@dataclass(frozen=True)
class Load:
    shape: models.Shape
    dtype: str
    requests: int
    slots: int
    prompt: int
    answer: int
    exact: float
    """Nats, mean over tokens, between engine and reference."""


def load_of(tiny: bool) -> Load:
    if tiny:
        return Load(models.TINY, "float32", 16, 8, 12, 24, 1e-4)
    return Load(models.QWEN3_06B, "bfloat16", 1024, 256, 64, 256, 0.03)


def run(report: Report, work: Path) -> None:
    load = load_of(report.tiny)
    models.write(work / "model", load.shape, dtype=getattr(torch, load.dtype))
    bare: dict[str, float] = {}
    if importlib.util.find_spec("vllm") is None:
        report.not_run("bare vLLM", "vllm is not installed")
    else:
        report.section("bare vLLM", 90, lambda: bare.update(_bare(report, work)))
    report.section("asyncrl's engine", 60, lambda: asyncio.run(_ours(report, work, load, bare)))


def prompts(load: Load) -> list[list[int]]:
    drawn = np.random.default_rng(0).integers(models.FIRST, load.shape["vocab_size"], (load.requests, load.prompt))
    return [row.tolist() for row in drawn]


def settings(load: Load, work: Path, tiny: bool, **more: Any) -> Any:
    from asyncrl.actors.engines.vllm.settings import VLLMSettings

    return VLLMSettings(
        work / "model", load.dtype, slots=load.slots, max_tokens=load.prompt + load.answer, start_s=STARTED_S,
        kv_gb=0.25 if tiny else 12.0, gpu_memory=0.5, args={} if tiny else GRAPHS, **more,
    )  # fmt: skip


# Bare vLLM, in a process of its own.


def _bare(report: Report, work: Path) -> dict[str, float]:
    script = Path(__file__).with_name("accept.py")
    command = [sys.executable, str(script), "--part", "2", "--work", str(work.parent), "--cell", "bare"]
    code = report.child(command + ["--tiny"] * report.tiny, work / "bare.log")
    if code != 0:
        ended = "was not ready in time" if code is None else f"ended with {code}"
        raise RuntimeError(f"bare vLLM {ended}:\n{end_of(work / 'bare.log')}")
    found: dict[str, float] = json.loads((work / "bare.json").read_text())
    for how, rate in found.items():
        report.figure(f"bare vLLM, {how} [tokens/s]", rate)
    return found


def cell(name: str, work: Path, tiny: bool) -> None:
    import os

    from asyncrl.actors.engines.vllm.settings import engine_arguments, engine_environment, on_cpu

    load = load_of(tiny)
    chosen = settings(load, work, tiny)
    os.environ.update(engine_environment(chosen, cpu=on_cpu()))
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = engine_arguments(chosen, cpu=on_cpu())
    for own in ("worker_extension_cls", "enable_log_requests"):
        del arguments[own]
    llm = LLM(**arguments)

    def rate(logprobs: int | None, asked: Sequence[list[int]]) -> float:
        params = SamplingParams(
            max_tokens=load.answer, temperature=1.0, ignore_eos=True, logprobs=logprobs, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        at = time.perf_counter()
        outs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False)
        return sum(len(out.outputs[0].token_ids) for out in outs) / (time.perf_counter() - at)

    asked = prompts(load)
    rate(0, asked[: load.slots])
    found = {"without logprobs": rate(None, asked), "logprobs": rate(0, asked)}
    (work / "bare.json").write_text(json.dumps(found))


# asyncrl's engine.


async def _ours(report: Report, work: Path, load: Load, bare: dict[str, float]) -> None:
    at = time.monotonic()
    async with _engine(report, work, load) as engine:
        report.figure("asyncrl's engine is up [s]", time.monotonic() - at)
        await _generate(engine, prompts(load)[: load.slots], load, "warm")
        at = time.perf_counter()
        made = await _generate(engine, prompts(load), load, "all")
        rate = sum(len(g.token_ids) for g in made) / (time.perf_counter() - at)
        report.figure("asyncrl's engine, with logprobs [tokens/s]", rate)
        for how, goal in (("logprobs", 0.97), ("without logprobs", 0.95)):
            if how in bare:
                report.at_least(f"asyncrl's engine over bare vLLM, {how}", goal, rate / bare[how])
        await _updated(report, engine, load, work)


async def _generate(engine: Engine, asked: Sequence[list[int]], load: Load, name: str) -> list[Generation]:
    calls = [engine.generate(f"{name}.{i}", ids, Sampling(load.answer, 1.0, (), seed=i)) for i, ids in enumerate(asked)]
    return await asyncio.gather(*calls)


@asynccontextmanager
async def _engine(report: Report, work: Path, load: Load) -> AsyncIterator[Engine]:
    engine: Any
    if importlib.util.find_spec("vllm") is None:
        from asyncrl.actors.engines.hf.engine import HFEngine
        from asyncrl.config import ModelConfig
        from asyncrl.model import load_model

        model = load_model(ModelConfig(path=str(work / "model"), dtype="float32"))
        engine = HFEngine(model, slots=load.slots, max_tokens=load.prompt + load.answer)
    else:
        from asyncrl.actors.engines.vllm.engine import VLLMEngine

        engine = VLLMEngine(settings(load, work, report.tiny, transfer=report.on_gpu))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def _updated(report: Report, engine: Engine, load: Load, work: Path) -> None:
    device = "cuda" if report.on_gpu else "cpu"
    versions = [models.random_model(load.shape, seed, device).to(getattr(torch, load.dtype)) for seed in (0, 1)]
    asked = prompts(load)[: load.slots]
    in_flight = _names_versions()
    with tempfile.TemporaryDirectory(prefix="asyncrl-accept-") as folder:
        publisher, subscriber = _channel(Path(folder), report.on_gpu)
        try:
            publisher.publish(0, 1, _named(versions[1]))
            before = engine.load_stats()["generated"]
            running = asyncio.ensure_future(_generate(engine, asked, load, "flight"))
            if in_flight:
                await _until(lambda: engine.load_stats()["generated"] > before + load.slots * load.answer / 3)
            else:
                report.not_run("update in flight", "this vLLM does not say which version sampled a token")
                await running
            await _new_weights(report, engine, subscriber)
            made = await running
        finally:
            subscriber.close()
            if (close := getattr(publisher, "close", None)) is not None:
                close()
    if in_flight:
        newer = float(np.mean(np.concatenate([g.versions for g in made]) == 1))
        report.judge("share of tokens in flight that the new version sampled", "above 0, below 1", newer, 0 < newer < 1)
    _compare(report, "in flight" if in_flight else "before", made, asked, versions, load)
    fresh = await _generate(engine, asked, load, "fresh")
    only = all((g.versions == 1).all() for g in fresh)
    report.judge("fresh requests after the update: version", "1 for every token", 1 if only else "mixed", only)
    _compare(report, "after the update", fresh, asked, versions, load)


async def _new_weights(report: Report, engine: Engine, subscriber: Subscriber) -> None:
    await _until(lambda: subscriber.latest() is not None)
    weights = await asyncio.to_thread(subscriber.open)
    await engine.check(weights)
    at = time.perf_counter()
    await engine.pause(recompute_kv=True)
    await engine.load(weights)
    await engine.resume()
    report.figure("generation stands still for new weights [s]", time.perf_counter() - at)
    weights.close()


def _names_versions() -> bool:
    if importlib.util.find_spec("vllm") is None:
        return True
    from asyncrl.actors.engines.vllm.settings import names_versions

    return names_versions()


def _channel(folder: Path, on_gpu: bool) -> tuple[Publisher, Subscriber]:
    """`cuda_ipc` on a GPU, `shm` on a CPU."""
    if not on_gpu:
        from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber

        return ShmPublisher(folder / "weights"), ShmSubscriber(folder / "weights")
    from asyncrl.weights.device.publisher import DevicePublisher
    from asyncrl.weights.device.subscriber import DeviceSubscriber
    from asyncrl.weights.device.transports import Mapped

    device = torch.device("cuda", torch.cuda.current_device())
    address = f"ipc://{folder}/w"
    return DevicePublisher(address, Mapped(), device), DeviceSubscriber(address, "accept", lambda: device)


def _named(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


async def _until(true: Any, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:g} s")
        await asyncio.sleep(0.002)


def _compare(
    report: Report, when: str, made: list[Generation], asked: list[list[int]], versions: list[Any], load: Load
) -> None:
    """|logprob of the engine - of the reference|, mean over the tokens of some requests."""
    own, other = [], []
    for g, ids in list(zip(made, asked, strict=True))[:16]:
        expected = np.stack([_reference(model, ids, g) for model in versions])
        at = np.arange(len(g.token_ids))
        own.append(np.abs(g.logprobs - expected[g.versions, at]))
        other.append(np.abs(g.logprobs - expected[1 - g.versions, at]))
    report.at_most(f"logprobs {when}, of the own version: |difference| [nats]", load.exact, _mean(own))
    report.at_least(f"logprobs {when}, of the other version: |difference| [nats]", 0.1, _mean(other))


def _mean(parts: list[np.ndarray]) -> float:
    return float(np.concatenate(parts).mean())


@torch.no_grad()
def _reference(model: Any, prompt: list[int], g: Generation) -> np.ndarray:
    """[N] logprobs of the generated tokens, from one pass of transformers' own forward."""
    ids = torch.tensor([[*prompt, *g.token_ids.tolist()]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
