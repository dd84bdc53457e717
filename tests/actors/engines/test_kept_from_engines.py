"""Kept ids as each engine gives them: the embedded one by itself, vLLM in its outputs and over HTTP (fake outputs)."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.actors.engines.hf.engine import HFEngine
from asyncrl.actors.engines.kept import kept_of
from asyncrl.actors.engines.protocol import Engine, EngineDied, Generation, Sampling
from asyncrl.actors.engines.sampling import truncate
from asyncrl.actors.engines.servers.dialect import Output
from asyncrl.actors.engines.servers.engine import ServerEngine
from asyncrl.actors.engines.vllm.attached import VLLMServer
from asyncrl.actors.engines.vllm.engine import _generation
from asyncrl.actors.engines.vllm.requests import Request, Requests
from asyncrl.actors.engines.vllm.settings import VLLMSettings, engine_arguments, require_masks, wants_masks
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from tests.actors.engines.engine_conformance import Subject
from tests.actors.engines.test_engine_hf import MAX_TOKENS, VOCAB, all_of, play, tiny, until

ASKED = Sampling(8, 1.0, (), 1, top_p=0.6, max_kept=64)


def by_definition(logits: torch.Tensor, top_p: float, top_k: int, min_p: float) -> set[int]:
    """Token by token: top-k and min-p, then the fewest that reach top-p of what is left."""
    p = torch.softmax(logits.double(), -1).tolist()
    ranked = sorted(range(len(p)), key=lambda i: -p[i])
    left = [i for i in ranked[: top_k or len(p)] if p[i] >= min_p * p[ranked[0]]]
    total, kept, reached = sum(p[i] for i in left), [], 0.0
    for i in left:
        if kept and top_p < 1 and reached >= top_p * total:
            break
        kept.append(i)
        reached += p[i]
    return set(kept)


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"),
    [(0.7, 0, 0.0), (1.0, 3, 0.0), (1.0, 0, 0.2), (0.9, 12, 0.02), (0.5, 5, 0.3), (1.0, 1, 0.0), (0.01, 0, 0.0)],
)
def test_what_is_left_is_what_the_definition_leaves(top_p: float, top_k: int, min_p: float) -> None:
    g = torch.Generator().manual_seed(1)
    logits, ones = 3 * torch.randn(50, 40, generator=g), torch.ones(50)
    left = truncate(logits, ones, ones * top_p, (ones * top_k).long(), ones * min_p)
    found = kept_of(left, np.full(50, 40))
    for row, ids in zip(logits, found, strict=True):
        assert ids is not None
        assert set(ids.tolist()) == by_definition(row, top_p, top_k, min_p)


def test_rows_that_ask_for_none_or_keep_too_many() -> None:
    logits = torch.zeros(3, 6)
    logits[:, 2:4] = -torch.inf
    first, second, third = kept_of(logits, np.array([0, 4, 3]))
    assert first is None
    assert second is not None
    assert second.tolist() == [0, 1, 4, 5]
    assert third is not None
    assert third.tolist() == []


def test_the_embedded_engine_gives_what_it_drew_from() -> None:
    """Beside requests that are not truncated, or do not ask, and in whatever slot."""
    model = tiny(0)
    subject = Subject(lambda: HFEngine(model, slots=2, max_tokens=MAX_TOKENS), model, model, VOCAB, MAX_TOKENS)
    kinds = [ASKED, replace(ASKED, max_kept=0), Sampling(8, 1.0, (), 1), replace(ASKED, top_p=1.0, min_p=0.5)]
    asked = [([5, 6, i], replace(kinds[i % 4], seed=i)) for i in range(8)]
    for (prompt, sampling), out in zip(asked, play(subject, lambda e: all_of(e, asked)), strict=True):
        assert (out.kept is None) == (sampling.max_kept == 0)
        if out.kept is None:
            continue
        assert out.kept.problem(out.token_ids) == ""
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *out.token_ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        sets = np.split(out.kept.ids, out.kept.counts.cumsum()[:-1])
        for row, ids, token, logprob in zip(logits, sets, out.token_ids, out.logprobs, strict=True):
            assert set(ids.tolist()) == by_definition(row, sampling.top_p, 0, sampling.min_p)
            among = row[torch.from_numpy(ids).long()].log_softmax(0)
            assert float(among[ids.tolist().index(token)]) == pytest.approx(float(logprob), abs=1e-5)


def test_an_aborted_request_has_those_of_its_tokens() -> None:
    model = tiny(0)

    async def scenario(engine: Engine) -> tuple[Generation, Generation]:
        running = asyncio.ensure_future(engine.generate("a", [1], replace(ASKED, max_new_tokens=200)))
        waiting = asyncio.ensure_future(engine.generate("b", [1], ASKED))
        await until(lambda: engine.load_stats()["generated"] > 3)
        await engine.abort("b")
        await engine.abort("a")
        return await running, await waiting

    subject = Subject(lambda: HFEngine(model, slots=1, max_tokens=MAX_TOKENS), model, model, VOCAB, MAX_TOKENS)
    for out in play(subject, scenario):
        assert out.kept is not None
        assert len(out.kept.counts) == len(out.token_ids)
        assert len(out.first(2).kept.counts) == len(out.token_ids[:2])  # type: ignore[union-attr]


def a_step(tokens: list[int], sets: list[list[int]] | None) -> Any:
    """A step of vLLM's core as of 0.32: one position without offsets, several with them."""
    mask = None
    if sets is not None:
        ends = np.cumsum([0, *map(len, sets)])
        ids = np.array([i for ids in sets for i in ids], np.int32)
        mask = SimpleNamespace(token_ids=ids, offsets=None if len(sets) == 1 else ends)
    logprobs = SimpleNamespace(logprobs=np.full((len(tokens), 1), -0.5))
    return SimpleNamespace(
        new_token_ids=tokens, prefill_stats=None, new_logprobs=logprobs, new_sampling_mask=mask, finish_reason=None
    )


def taken(steps: list[Any], max_kept: int) -> Generation:
    request = Request(asyncio.new_event_loop().create_future(), max_kept=max_kept)
    for step in steps:
        request.take(step, 3)
    return _generation(request, "stop", 3, None)


def test_vllms_outputs_bring_them() -> None:
    steps = [a_step([7], [[9, 7]]), a_step([1, 2], [[1], [5, 2, 0]]), a_step([4], [[4, 6, 8, 1]])]
    out = taken(steps, 3)
    assert out.kept is not None
    assert out.kept.counts.tolist() == [2, 1, 3, 0]
    assert out.kept.ids.tolist() == [7, 9, 1, 0, 2, 5]
    assert taken(steps, 0).kept is None
    with pytest.raises(EngineDied, match="kept ids of 1 of 2 tokens"):
        taken([steps[0], a_step([5], None)], 3)


def test_a_vllm_server_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    output, dialect = Output(), VLLMServer(masks=True)
    chunk = {"token_ids": [7, 1], "logprobs": {"content": [{"logprob": -0.5}] * 2}, "sampling_mask": [[9, 7], [1]]}
    dialect.take({"choices": [chunk]}, output)
    spans = [{"version": "4", "start": 0, "end": 3}]
    last = {"token_ids": [3], "logprobs": {"content": [{"logprob": -0.1}]}, "finish_reason": "stop",
            "weight_versions": spans}  # fmt: skip
    dialect.take({"choices": [last | {"sampling_mask": [[3, 2]]}]}, output)
    engine: Any = ServerEngine.__new__(ServerEngine)
    server: Any = SimpleNamespace(url="http://a:1")
    out = engine._generation(output, server, None, 8)
    assert out.kept.counts.tolist() == [2, 1, 2]
    output.kept.pop()
    with pytest.raises(EngineDied, match=r"2 of 3 tokens.*--return-sampling-mask"):
        engine._generation(output, server, None, 8)
    assert engine._generation(output, server, None, 0).kept is None


def test_a_greedy_request_is_asked_for_as_vllm_takes_it_under_masks() -> None:
    """It refuses temperature 0 where it returns masks."""
    greedy = Sampling(8, 0.0, (), 1, top_p=0.9, top_k=50)
    _, body = VLLMServer(masks=True).generate("r", [1], 8, greedy, "s")
    assert [body["sampling_params"][name] for name in ("temperature", "top_p", "top_k", "min_p")] == [1.0, 1.0, 1, 0.0]
    _, body = VLLMServer().generate("r", [1], 8, greedy, "s")
    assert [body["sampling_params"][name] for name in ("temperature", "top_p", "top_k")] == [0.0, 0.9, 50]
    asked: list[Any] = []

    class Core:
        async def add_request_async(self, request: Any) -> None:
            asked.append(request)

    def checked(*parameters: Any) -> Any:
        return SimpleNamespace(parameters=parameters, sampling_params=SimpleNamespace())

    requests: Any = Requests.__new__(Requests)
    requests._core, requests._room, requests._seeds, requests._sent = Core(), 64, False, {}
    requests._names, requests._common = iter("ab"), checked
    errors = ModuleType("vllm.v1.engine.exceptions")
    errors.EngineDeadError = RuntimeError  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, "vllm.v1.engine.exceptions", errors)

        async def send() -> None:
            for masks in (True, False):
                requests._masks = masks
                await requests.send(Request(asyncio.get_running_loop().create_future()), [1], greedy, "s", None)

        asyncio.run(send())
    assert [request.parameters[:2] for request in asked] == [(1.0, (1.0, 1, 0.0)), (0.0, (0.9, 50, 0.0))]


def of(**actors: Any) -> Config:
    return Config.model_validate({"actors": {"engine": "vllm", **actors}, "learner": {"unsafe": True}})


def fake_vllm(patch: pytest.MonkeyPatch, version: str, fields: tuple[str, ...], cpu: bool) -> None:
    """As much of vLLM as is asked before it starts."""
    vllm, arguments, platforms = ModuleType("vllm"), ModuleType("vllm.engine.arg_utils"), ModuleType("vllm.platforms")
    vllm.__version__ = version  # type: ignore[attr-defined]
    arguments.EngineArgs = SimpleNamespace(__dataclass_fields__=dict.fromkeys(fields))  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        device_type="cpu" if cpu else "cuda", is_cpu=lambda: cpu
    )
    for name, module in {"vllm": vllm, "vllm.engine": ModuleType("vllm.engine"), "vllm.engine.arg_utils": arguments,
                         "vllm.platforms": platforms}.items():  # fmt: skip
        patch.setitem(sys.modules, name, module)


def test_a_vllm_that_returns_no_masks_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    truncated = of(top_p=0.9, top_k=256)
    fake_vllm(monkeypatch, "0.24.0", ("model",), cpu=False)
    with pytest.raises(ConfigError, match=r"vLLM 0\.24\.0 does not return the kept ids.*Install vLLM 0\.32"):
        require_masks(truncated)
    require_masks(of(top_p=0.9, max_kept=0))
    require_masks(of())
    fake_vllm(monkeypatch, "0.32.0", ("model", "return_sampling_mask"), cpu=False)
    require_masks(truncated)
    fake_vllm(monkeypatch, "0.32.0", ("model", "return_sampling_mask"), cpu=True)
    with pytest.raises(ConfigError, match=r"on a CPU vLLM does not return.*actors\.engine hf"):
        require_masks(truncated)
    require_masks(of(top_p=0.9, max_kept=0))
    with pytest.raises(ConfigError, match=r"actors\.min_p"):
        require_masks(of(min_p=0.1, max_kept=0))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here (`make test-vllm`)")
def test_the_installed_vllm_has_the_argument() -> None:
    from asyncrl.actors.engines.vllm.settings import returns_masks

    assert returns_masks()


def test_it_is_asked_for_where_it_is_needed_alone() -> None:
    settings = VLLMSettings(Path("/model"), "float32", slots=8, max_tokens=512)
    assert "return_sampling_mask" not in engine_arguments(settings, cpu=False)
    assert engine_arguments(replace(settings, masks=True), cpu=False)["return_sampling_mask"] is True
    wanted = [wants_masks(of(**a)) for a in ({}, {"top_k": 5}, {"top_k": 5, "max_kept": 0})]
    assert wanted == [False, True, False]
