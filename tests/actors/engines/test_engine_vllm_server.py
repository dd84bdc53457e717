"""The engine `vllm_server` against a real vLLM server; runs where vLLM is installed, by `make test-vllm`."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here (`make test-vllm` runs these tests)", allow_module_level=True)

from asyncrl.actors.engines import build_engine
from asyncrl.actors.engines.servers.process import ServerProcess, free_port
from asyncrl.actors.engines.vllm.attached import COMMAND
from asyncrl.config import Config
from tests.actors.engines.engine_conformance import *  # noqa: F403
from tests.actors.engines.engine_conformance import MAX_TOKENS, VOCAB, Shared, Subject, closed_under, play, tiny

pytestmark = pytest.mark.timeout(300)
torch.set_num_threads(1)

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """The command that the docs give, with what a CPU wants added."""
    folder, port = tmp_path_factory.mktemp("model"), free_port()
    tiny(0).save_pretrained(folder)
    dev_mode, vllm, serve, *command = COMMAND.replace("MODEL", str(folder)).split()
    assert (vllm, serve) == ("vllm", "serve")
    # The CPU build's `vllm` does not start, because its package has another name; this is what it would start.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *command]
    command += ["--port", str(port), "--host", "127.0.0.1"]
    command += ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "64"]
    server = ServerProcess(command, {**ENVIRONMENT, **dict([dev_mode.split("=")])})
    server.start()
    actors = {"engine": "vllm_server", "engine_options": {"urls": [f"http://127.0.0.1:{port}"]}}
    parts = {"model": {"path": str(folder)}, "env": {"max_tokens": MAX_TOKENS}, "launch": {"start_s": 240}}
    engine = build_engine(Config.model_validate({**parts, "actors": actors}))
    shared = Shared(engine, tiny(0))
    try:
        with asyncio.Runner() as runner:
            yield Subject(lambda: shared, tiny(0), tiny(1), VOCAB, MAX_TOKENS, runner)
            runner.run(engine.close())
    finally:
        server.stop()


# Here it is the last test of the engine that they share: pytest goes by the place of the name.
del test_closing_ends_what_runs  # noqa: F821


def test_closing_ends_what_runs(subject: Subject) -> None:
    play(subject, lambda engine: closed_under(engine, 20))
