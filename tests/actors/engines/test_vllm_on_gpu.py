"""What the engine decides for a GPU, tested without one: seeds, the cache of a shared GPU, the wait after an update."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncrl.actors.engines.vllm.settings import (
    WORK_BYTES,
    VLLMSettings,
    engine_arguments,
    seeds_in_kernel,
    shared_kv_gb,
)
from asyncrl.errors import ConfigError

SETTINGS = VLLMSettings(Path("/model"), "bfloat16", slots=8, max_tokens=512, gpu_memory=0.35)


def test_no_seed_where_each_would_be_a_generator() -> None:
    """F10."""
    assert seeds_in_kernel(SimpleNamespace(use_v2_model_runner=True))
    assert not seeds_in_kernel(SimpleNamespace(use_v2_model_runner=False))
    assert not seeds_in_kernel(SimpleNamespace())  # a vLLM that has only the older runner


def test_on_a_shared_gpu_the_cache_is_computed_and_not_measured() -> None:
    """F9: what the learner allocated while vLLM measured was taken for vLLM's."""
    shapes = {"w": (1 << 20, 256), "b": (7,)}
    gpu = 40 << 30
    found = shared_kv_gb(SETTINGS, shapes, gpu)
    assert found * 2**30 == pytest.approx(0.35 * gpu - 2 * (2**28 + 7) - WORK_BYTES)
    arguments = engine_arguments(replace(SETTINGS, kv_gb=found), cpu=False)
    assert arguments["kv_cache_memory_bytes"] == int(found * 2**30)
    halved = shared_kv_gb(replace(SETTINGS, tensor_parallel=2), shapes, gpu)
    assert (halved - found) * 2**30 == pytest.approx(2**28, rel=1e-3)
    with pytest.raises(ConfigError, match=r"gpu_memory is 0\.35 of a GPU with 4\.0 GiB.*no KV cache is left"):
        shared_kv_gb(SETTINGS, shapes, 4 << 30)


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a fake vLLM that `transfer.py` needs in order to be imported, where vLLM is not installed."""

    @dataclass
    class Info:
        pass

    class Request:
        def __init__(self, info: Any) -> None:
            self.info = info

    base = ModuleType("vllm.distributed.weight_transfer.base")
    names = {"WeightTransferInitInfo": Info, "WeightTransferUpdateInfo": Info, "WeightTransferEngine": object}
    vars(base).update(names, WeightTransferInitRequest=Request, WeightTransferUpdateRequest=Request)
    factory = ModuleType("vllm.distributed.weight_transfer.factory")
    vars(factory).update(WeightTransferEngineFactory=SimpleNamespace(register_engine=lambda *_: None))
    package = ModuleType("vllm.distributed.weight_transfer")
    vars(package).update(base=base, factory=factory)
    # Of a CPU only; it imports much of vLLM.
    on_cpus = ModuleType("asyncrl.actors.engines.vllm.cpu_load")
    vars(on_cpus).update(pack_tied_head=lambda *_: None)
    monkeypatch.setitem(sys.modules, on_cpus.__name__, on_cpus)
    for module in (ModuleType("vllm"), ModuleType("vllm.distributed"), package, base, factory):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "asyncrl.actors.engines.vllm.transfer", raising=False)


def test_the_learner_gets_its_memory_back_after_the_gpu_has_read_it(fake_vllm: None) -> None:
    """F17: the slot was given back while copies of its last chunks could still run."""
    from asyncrl.actors.engines.vllm import transfer

    done: list[str] = []

    class FakeLLM:
        def __getattr__(self, name: str) -> Any:
            async def called(*arguments: Any) -> None:
                done.append(arguments[0] if name == "collective_rpc" else name)

            return called

    async def command(name: str, reply: Awaitable[Any]) -> Any:
        return await reply

    weights: Any = SimpleNamespace(
        send=lambda: done.append("send"), transfer=lambda: {}, settle=lambda: done.append("given back")
    )
    asyncio.run(transfer.transfer(FakeLLM(), weights, command))
    sys.modules.pop("asyncrl.actors.engines.vllm.transfer")
    order = ["send", "start_weight_update", "update_weights", "finish_weight_update", "asyncrl_synchronize"]
    assert done == [*order, "given back"]
