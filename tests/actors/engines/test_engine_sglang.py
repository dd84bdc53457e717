"""The engine `sglang`: against a fake of the server, and, by `make test-sglang`, against the real one on a CPU."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.engines import build_engine
from asyncrl.actors.engines.protocol import Engine, EngineDied
from asyncrl.actors.engines.servers.engine import ServerEngine
from asyncrl.actors.engines.sglang.weights import GroupCarrier, TensorCarrier
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from tests.actors.engines.engine_conformance import *  # noqa: F403
from tests.actors.engines.engine_conformance import (
    MAX_TOKENS,
    TOLERANCE,
    VOCAB,
    HeldWeights,
    Shared,
    Subject,
    closed_under,
    judge,
    play,
    sampling,
    tiny,
    until,
)  # fmt: skip
from tests.actors.engines.fake_sglang import FakeSGLang

PYTHON = os.environ.get("ASYNCRL_SGLANG_PYTHON")
"""Interpreter of an environment with the real SGLang; without it, the fake serves."""
ON_A_CPU = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "disable_overlap_schedule": True, "disable_cuda_graph": True, "grammar_backend": "none",
    "mem_fraction_static": 0.1, "max_total_tokens": 65536,
}  # fmt: skip

pytestmark = pytest.mark.timeout(600 if PYTHON else 60)


def configured(folder: Path, **actors: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"max_tokens": MAX_TOKENS},
            "launch": {"start_s": 300},
            "learner": {"unsafe": True},
            "actors": {"engine": "sglang", "slots": 64, **actors},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def subject(folder: Path) -> Iterator[Subject]:
    with asyncio.Runner() as runner:
        if PYTHON:
            stubs = str(Path(__file__).parent / "sglang_stubs")
            environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": stubs, "OMP_NUM_THREADS": "1"}
            options = {"python": PYTHON, "args": ON_A_CPU, "environment": environment}
            engine: Any = build_engine(configured(folder, engine_options=options))
            yield Subject(_shared(engine), tiny(0), tiny(1), VOCAB, MAX_TOKENS, runner)
            runner.run(engine.close())
            return
        with FakeSGLang(tiny(0)).serving() as url:
            engine = build_engine(configured(folder, engine_options={"urls": [url]}))
            yield Subject(_shared(engine), tiny(0), tiny(1), VOCAB, MAX_TOKENS, runner)
            runner.run(engine.close())


def _shared(engine: Any) -> Any:
    shared = Shared(engine, tiny(0))
    return lambda: shared


@pytest.mark.system
@pytest.mark.parametrize("how", ["tensor", "group"])
@pytest.mark.system
def test_weights_without_a_folder(subject: Subject, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same conformance tests, once the weights come another way."""
    engine: Any = subject.make()._engine
    carrier = TensorCarrier() if how == "tensor" else GroupCarrier("gloo", "127.0.0.1", 60.0)

    async def begin(_: Engine) -> None:
        await carrier.start(engine.servers)

    play(subject, begin)
    monkeypatch.setattr(engine, "_carrier", carrier)
    try:
        test_new_weights_between_two_tokens(subject, True)  # noqa: F405
        test_new_weights_between_two_tokens(subject, False)  # noqa: F405
        test_after_new_weights_a_fresh_request_is_the_new_policys_alone(subject)  # noqa: F405
    finally:
        carrier.close()


# Here it is the last test of the engine that they share: pytest goes by the place of the name.
del test_closing_ends_what_runs  # noqa: F821


def test_closing_ends_what_runs(subject: Subject) -> None:
    play(subject, lambda engine: closed_under(engine, 20))


@pytest.mark.system
def test_two_servers_share_the_requests_and_both_take_new_weights(folder: Path) -> None:
    fakes = [FakeSGLang(tiny(0)), FakeSGLang(tiny(0))]
    with fakes[0].serving() as first, fakes[1].serving() as second:
        engine: Any = build_engine(configured(folder, engine_options={"urls": [first, second + "/"]}))

        async def scenario(engine: Engine) -> None:
            running = [asyncio.ensure_future(engine.generate(f"r{i}", [1], sampling(n=100))) for i in range(10)]
            await until(lambda: engine.load_stats()["generated"] >= 50)
            await engine.pause(False)
            assert [len(fake.running) for fake in fakes] == [5, 5]
            await engine.load(HeldWeights(tiny(1), 3))
            await engine.resume()
            assert {v for out in await asyncio.gather(*running) for v in out.versions.tolist()} == {0, 3}

        play(Subject(lambda: engine, None, None, VOCAB, MAX_TOKENS), scenario)
    assert [fake.version for fake in fakes] == ["3", "3"]


def test_a_request_that_waits_stays_out_when_a_pause_follows_a_resume_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts: list[str] = []
    with FakeSGLang(tiny(0)).serving() as url:
        engine: Any = build_engine(configured(folder, engine_options={"urls": [url]}))
        sent = engine._dialect.generate

        def noted(name: str, prompt: list[int], n: int, how: Any, salt: str) -> Any:
            salts.append(salt.partition(".")[2])
            return sent(name, prompt, n, how, salt)

        async def scenario(engine: Any) -> None:
            monkeypatch.setattr(engine._dialect, "generate", noted)
            await engine.pause(False)
            waiting = asyncio.ensure_future(engine.generate("r", [1], sampling(n=5)))
            await until(lambda: len(engine._open._waiters) == 1)
            await engine.resume()
            await engine.pause(False)
            assert salts == []
            await engine.load(HeldWeights(tiny(1), 3))
            await engine.resume()
            assert set((await waiting).versions.tolist()) == {3}

        play(Subject(lambda: engine, None, None, VOCAB, MAX_TOKENS), scenario)
    assert salts == ["0.3"]


def test_a_server_that_streams_all_it_has_each_time_says_the_same(folder: Path) -> None:
    with FakeSGLang(tiny(0), incremental=False).serving() as url:
        engine: Any = build_engine(configured(folder, engine_options={"urls": [url]}))
        subject = Subject(lambda: engine, None, None, VOCAB, MAX_TOKENS)
        out = play(subject, lambda e: e.generate("r", [1, 2], sampling(n=20)))
        np.testing.assert_allclose(out.logprobs, judge(tiny(0), [1, 2], out.token_ids, 1.0), atol=TOLERANCE)


def test_a_lost_server_ends_the_engine(folder: Path) -> None:
    async def scenario(engine: Engine) -> None:
        running = asyncio.ensure_future(engine.generate("r", [1], sampling(n=MAX_TOKENS)))
        await until(lambda: engine.load_stats()["generated"] >= 5)
        await asyncio.to_thread(serving.__exit__, None, None, None)
        with pytest.raises(EngineDied, match=r"http://127.0.0.1"):
            await running

    serving = FakeSGLang(copy.deepcopy(tiny(0))).serving()
    url = serving.__enter__()
    engine: Any = build_engine(configured(folder, engine_options={"urls": [url]}))
    play(Subject(lambda: engine, None, None, VOCAB, MAX_TOKENS), scenario)


@pytest.mark.parametrize(
    ("actors", "says"),
    [
        ({}, r"environment of its own.*engine_options\.python.*engine_options\.urls"),
        ({"engine_options": {"urls": ["http://a:1"], "python": "python"}}, "not both"),
        ({"engine_options": {"urls": ["a:1"]}}, "expected a list of http"),
        ({"engine_options": {"urls": ["http://a:1"]}, "count": 2}, "names 1 servers for 2 actors"),
        ({"engine_options": {"python": "/nowhere/python"}}, "no such interpreter"),
        ({"engine_options": {"python": "python", "args": {"port": 1}}}, "port is set by asyncrl"),
        ({"engine_options": {"urls": ["http://a:1"], "args": {"tp": 2}}}, "that `python` starts"),
        ({"engine_options": {"urls": ["http://a:1"]}, "top_k": 5, "max_kept": 0}, "whole distribution"),
        ({"engine_options": {"urls": ["http://a:1"], "weights": "pigeon"}}, "expected one of disk, tensor, group"),
        (
            {"engine_options": {"urls": ["http://a:1"], "weights": "group", "weights_dir": "/x"}},
            "is for weights `disk`",
        ),
        ({"engine_options": {"python": "python", "weights": "tensor", "args": {"tp": 2}}}, "of one rank"),
    ],
)
def test_what_cannot_be_is_named(folder: Path, actors: dict[str, Any], says: str) -> None:
    config = configured(folder, **actors)
    with pytest.raises(ConfigError, match=says):
        build_engine(config)


def test_each_actor_has_servers_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [f"http://host:{i}" for i in range(5)]
    config = configured(folder, engine_options={"urls": urls}, count=2)
    monkeypatch.setenv("ASYNCRL_ROLE", "actor-1")
    engine = build_engine(config)
    assert isinstance(engine, ServerEngine)
    assert [server.url for server in engine.servers.all] == [urls[1], urls[3]]


@pytest.mark.system
def test_a_server_that_does_not_come_up_is_named(folder: Path) -> None:
    config = configured(folder, engine_options={"urls": ["http://127.0.0.1:9"]})
    config = config.model_copy(update={"launch": config.launch.model_copy(update={"start_s": 0.3})})

    async def start() -> None:
        with pytest.raises(EngineDied, match=r"http://127.0.0.1:9 did not serve within 0.3 s \(launch.start_s\)"):
            await build_engine(config).start()

    asyncio.run(start())
