"""Weights into real vLLM's workers through its weight-transfer API, over a process group; gloo, because vLLM runs on a
CPU here. Over NCCL and CUDA IPC the same code runs on a GPU."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here (`make test-vllm` runs these tests)", allow_module_level=True)

from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.actors.engines.protocol import Engine, EngineDied, Generation, WeightsMismatch
from asyncrl.actors.engines.vllm.engine import VLLMEngine, _generation
from asyncrl.actors.engines.vllm.requests import EngineCounts, Request, Requests
from asyncrl.actors.engines.vllm.settings import VLLMSettings, require_versions
from asyncrl.actors.weight_updates import WeightUpdates
from asyncrl.errors import ConfigError, RunError
from asyncrl.weights.device.host_copy import PinnedSubscriber, PinningPublisher
from asyncrl.weights.device.publisher import DevicePublisher
from asyncrl.weights.device.subscriber import DeviceSubscriber
from asyncrl.weights.device.transports import Broadcast
from asyncrl.weights.local.shm import ShmSubscriber
from tests.actors.engines.engine_conformance import Subject, judge, play, prompts, sampling

pytestmark = pytest.mark.timeout(300)
torch.set_num_threads(1)
CPU = torch.device("cpu")
VOCAB, MAX_TOKENS = 64, 256
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": MAX_TOKENS, "initializer_range": 0.3,
}  # fmt: skip


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).eval()


def two(chunks: list[torch.Tensor]) -> Any:
    yield from chunks[:2]
    raise RunError("an engine is lost")


def test_weights_by_vllms_own_transfer_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one test, because vLLM takes seconds to start: versions between two tokens of running requests, the second by
    one broadcast to another reader too; a broadcast to both that fails after two chunks; weights that do not fit,
    refused; a chunk with a wrong checksum, which ends the engine rather than being served."""
    tiny(0).save_pretrained(tmp_path / "model")
    settings = VLLMSettings(
        tmp_path / "model", "float32", slots=64, max_tokens=MAX_TOKENS, kv_gb=0.25, transfer=True, record=False
    )
    engine = VLLMEngine(settings)
    models = [tiny(seed) for seed in range(3)]
    subject = Subject(lambda: engine, models[0], models[1], VOCAB, MAX_TOKENS)
    transport = Broadcast("gloo", tmp_path, wait_s=20.0, together_s=8.0)
    monkeypatch.setattr("asyncrl.weights.device.publisher.GATHER_S", 5.0)
    device = DevicePublisher(f"ipc://{tmp_path}/w", transport, CPU, chunk_bytes=30_000)
    peer = DeviceSubscriber(f"ipc://{tmp_path}/w", "peer", lambda: CPU)
    together: list[int] = []
    send_all = transport._all.send

    def counted(chunks: list[torch.Tensor], failed: Any) -> None:
        together.append(len(chunks))
        send_all(chunks, failed)

    transport._all.send = counted  # type: ignore[method-assign]
    learner = PinningPublisher(device, tmp_path / "shm")
    on_device = DeviceSubscriber(f"ipc://{tmp_path}/w", "actor-0", lambda: CPU)
    subscriber = PinnedSubscriber(on_device, ShmSubscriber(tmp_path / "shm"))
    asked = prompts(subject, 8)

    async def taken(updates: WeightUpdates, version: int) -> bool:
        async with asyncio.timeout(30):
            while (latest := subscriber.latest()) is None or latest.version != version:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return await updates.look()

    def read(version: int) -> bool:
        """By the other reader."""
        leased = peer.open()
        assert leased.id.version == version
        names = dict(leased.tensors()).keys()
        leased.close()
        return len(names) > 10

    async def scenario(_: Engine) -> list[Generation]:
        updates = WeightUpdates(engine, subscriber, recompute_kv=True)
        running = [asyncio.ensure_future(engine.generate(f"r{i}", p, sampling(i, n=200))) for i, p in enumerate(asked)]
        for version in (1, 2):
            while engine.load_stats()["generated"] < 200 * version:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            learner.publish(0, version, models[version].named_parameters())
            reading = asyncio.ensure_future(asyncio.to_thread(read, version))
            assert await taken(updates, version)
            assert engine.held_version == (0, version)
            assert await reading
            assert version == 2 or learner.pin((0, 1))
        outs = await asyncio.gather(*running)
        assert await updates.look(version=(0, 1)), "pinned for an evaluation: from host memory"
        assert engine.held_version == (0, 1)
        outs.append(await engine.generate("pinned", asked[0], sampling(9)))
        assert await updates.look()
        assert engine.held_version == (0, 2)
        outs.append(await engine.generate("fresh", asked[0], sampling(9)))

        assert len(together) >= 1
        transport._all.send = lambda chunks, failed: send_all(two(chunks), failed)  # type: ignore[method-assign]
        learner.publish(0, 3, models[1].named_parameters())
        assert len(device._slots[0].chunks) > 3
        reading = asyncio.ensure_future(asyncio.to_thread(read, 3))
        assert await taken(updates, 3)
        assert engine.held_version == (0, 3)
        assert await reading
        assert transport._all.lost
        outs.append(await engine.generate("rest", asked[0], sampling(9)))

        learner.publish(0, 4, [("model.norm.weight", torch.ones(64))])
        with pytest.raises(WeightsMismatch, match="missing"):
            await taken(updates, 4)
        assert engine.held_version == (0, 3)
        outs.append(await engine.generate("still", asked[0], sampling(9)))

        learner.publish(0, 5, models[1].named_parameters())
        slot = device._leases.newest
        assert slot is not None
        device._slots[slot].chunks[-1][200] ^= 1
        with pytest.raises(EngineDied):
            await taken(updates, 5)
        assert engine.held_version == (0, 3)
        return outs

    try:
        *begun, pinned, fresh, rest, still = play(subject, scenario)
    finally:
        peer.close()
        subscriber.close()
        learner.close()
    met_versions = set()
    for prompt, out in zip(asked, begun, strict=True):
        for version in sorted(set(out.versions.tolist())):
            met_versions.add(version)
            mine = out.versions == version
            expected = judge(models[version], prompt, out.token_ids, 1.0)
            np.testing.assert_allclose(out.logprobs[mine], expected[mine], atol=1e-4)
    assert met_versions == {0, 1, 2}
    for out, version, seed in ((pinned, 1, 1), (fresh, 2, 2), (rest, 3, 1), (still, 3, 1)):
        assert set(out.versions.tolist()) == {version}
        np.testing.assert_allclose(out.logprobs, judge(models[seed], asked[0], out.token_ids, 1.0), atol=1e-4)


def test_a_vllm_that_names_no_versions_is_drained_before_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.24 is: what a request is stamped with is what was held when it began, and must be held at its end."""
    require_versions(drain=False)
    monkeypatch.setattr("asyncrl.actors.engines.vllm.settings.names_versions", lambda: False)
    with pytest.raises(ConfigError, match=r"weights\.drain is false and vLLM .*set weights\.drain true"):
        require_versions(drain=False)
    require_versions(drain=True)
    step = SimpleNamespace(
        request_id="0", new_token_ids=[4], prefill_stats=None, events=None, finish_reason=None,
        new_logprobs=SimpleNamespace(logprobs=np.array([[-1.0]])),
    )  # fmt: skip

    async def scenario() -> Generation:
        requests: Any = Requests.__new__(Requests)
        mine = Request(asyncio.get_running_loop().create_future())
        requests.counts, requests._sent = EngineCounts(), {"0": mine}
        for reason in (None, "stop"):
            step.finish_reason, mine.id = reason, "0"
            requests._take(SimpleNamespace(outputs=[step], scheduler_stats=None))
        return _generation(mine, await mine.ended, 7, None)

    generation = asyncio.run(scenario())
    assert generation.versions.tolist() == [7, 7]
    assert (generation.token_ids.tolist(), generation.logprobs.tolist()) == ([4, 4], [-1.0, -1.0])
