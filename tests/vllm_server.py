"""A real vLLM server on a CPU, for the tests that `make test-vllm` runs."""

from __future__ import annotations

import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.actors.engines.servers.process import ServerProcess, free_port

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


@contextmanager
def vllm_server(model: str, *options: str) -> Iterator[str]:
    """The address of a server of `model`, without a path; `options` are added to what a CPU wants."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    server = ServerProcess(command, ENVIRONMENT)
    server.start()
    try:
        deadline = time.monotonic() + 240
        while not _serves(f"http://127.0.0.1:{port}/health"):
            assert not server.ended(), server.ended()
            assert time.monotonic() < deadline
            time.sleep(0.25)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


def _serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
