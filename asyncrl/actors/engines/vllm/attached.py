"""vLLM as a server: running `vllm serve` processes, by URL.

They need vLLM's development routes, for pauses and weights, and asyncrl's worker extension, which loads weights as the
embedded engine does (docs/how-to/engines.md has the command).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.actors.engines.protocol import Sampling
from asyncrl.actors.engines.servers.dialect import Output, Tensors
from asyncrl.actors.engines.servers.engine import ServerEngine, ServerSettings, own_urls
from asyncrl.actors.engines.servers.http import Servers
from asyncrl.actors.engines.vllm.requests import GREEDY_WITH_MASKS
from asyncrl.actors.engines.vllm.settings import wants_masks
from asyncrl.config import Config
from asyncrl.errors import ConfigError

COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs "
    "--generation-config vllm --worker-extension-cls asyncrl.actors.engines.vllm.worker.WorkerExtension"
)
"""Starts a server that this engine can use."""


def from_config(config: Config, *, urls: Sequence[str] = (), weights_dir: str | None = None) -> ServerEngine:
    """`actors.engine: vllm_server`. Raises ConfigError.

    Args:
        urls: running servers, one or more per actor, that serve `model.path` and have no other user.
        weights_dir: a folder that servers on other hosts see too; default: shared memory of this host.
    """
    from asyncrl.model import resolve_path

    if not urls:
        raise ConfigError(f"actors.engine_options.urls: expected the servers of vllm_server. Start each with {COMMAND}")
    settings = ServerSettings(
        model=resolve_path(config.model),
        max_tokens=config.env.max_tokens,
        urls=own_urls(urls, config.actors.count),
        start_s=config.launch.start_s,
        weights_dir=Path(weights_dir) if weights_dir else None,
    )
    return ServerEngine(VLLMServer(wants_masks(config)), PublishedFile(), settings)


class VLLMServer:
    """The HTTP interface of vLLM 0.32."""

    name, health = "vllm_server", "/health"

    def __init__(self, masks: bool = False) -> None:
        """`masks`: the servers were started with `--return-sampling-mask`."""
        self._masks = masks

    def generate(self, request: str, prompt: list[int], n: int, sampling: Sampling, salt: str) -> tuple[str, Any]:
        if not sampling.temperature and self._masks:
            sampling = replace(sampling, **GREEDY_WITH_MASKS)
        params = {
            "max_tokens": n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }
        return "/inference/v1/generate", {
            "request_id": request,
            "token_ids": prompt,
            "sampling_params": params,
            "stream": True,
            "cache_salt": salt,
        }

    def take(self, chunk: Any, output: Output) -> None:
        if not (choices := chunk.get("choices")):
            if "error" in chunk:
                output.reason = str(chunk["error"])
            return
        [choice] = choices
        output.ids += choice.get("token_ids") or []
        output.logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
        output.kept += choice.get("sampling_mask") or ()
        if choice.get("finish_reason"):
            output.reason = choice["finish_reason"]
        if choice.get("weight_versions"):
            output.spans = choice["weight_versions"]

    def abort(self, request: str) -> tuple[str, Any]:
        return "/abort_requests", {"request_ids": [f"generate-tokens-{request}"]}

    def pause(self, recompute_kv: bool) -> tuple[str, Any]:
        return f"/pause?mode=keep&clear_cache={str(recompute_kv).lower()}", {}

    def resume(self) -> tuple[str, Any]:
        return "/resume", {}

    def name_version(self, version: str) -> tuple[str, Any]:
        return "/update_weight_version", {"new_version": version}

    def refused(self, reply: Any) -> str:
        """Why a command failed. The results of workers come as text."""
        if all(result == "True" for result in reply.get("results") or ()):
            return ""
        return f"its workers cannot open the file of the weights (actors.engine_options.weights_dir): {reply}"


class PublishedFile:
    """Weights in a published file (weights/local/shm.py), which the servers' workers map."""

    async def start(self, servers: Servers) -> None:
        return None

    async def load(self, servers: Servers, folder: Path, tensors: Tensors, version: str, recompute_kv: bool) -> None:
        path, digest = await asyncio.to_thread(_write, folder, tensors)
        await servers.command(lambda _: ("/collective_rpc", {"method": "asyncrl_load", "args": [str(path), digest]}))

    def close(self) -> None:
        return None


def _write(folder: Path, tensors: Tensors) -> tuple[Path, str]:
    """(path, digest) of the file."""
    from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber

    id = ShmPublisher(folder, keep=1).publish(0, 0, tensors.items())
    weights = ShmSubscriber(folder).open(verify=False)
    weights.close()
    return folder / weights.path.name, id.digest
