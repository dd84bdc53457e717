"""SGLang as the engine: a server that this actor starts, or running servers, over SGLang's own HTTP interface.

SGLang pins another torch than asyncrl, so it always lives in another environment (`python`). Its pause modes
implement `weights.kv`: `retract` frees the KV cache and prefills again, `in_place` keeps it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.actors.engines.protocol import Sampling
from asyncrl.actors.engines.servers.dialect import Carrier, Output
from asyncrl.actors.engines.servers.engine import ServerEngine, ServerSettings, own_urls
from asyncrl.actors.engines.servers.process import ServerProcess, free_port
from asyncrl.actors.engines.sglang.weights import DiskCarrier, GroupCarrier, TensorCarrier, own_address
from asyncrl.config import Config
from asyncrl.errors import ConfigError

MARGIN = 8
INSTALL = (
    "actors.engine is 'sglang', which needs a server. SGLang pins another torch than asyncrl and lives in an "
    "environment of its own: there, pip install 'sglang==0.5.23'; then set actors.engine_options.python to that "
    "environment's interpreter, or actors.engine_options.urls to servers that run (docs/how-to/engines.md)."
)


def from_config(
    config: Config,
    *,
    urls: Sequence[str] | None = None,
    python: str | None = None,
    args: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    weights: str = "disk",
    weights_dir: str | None = None,
    group_backend: str = "nccl",
) -> ServerEngine:
    """`actors.engine: sglang`. Raises ConfigError.

    Args:
        urls: running servers, one or more per actor, that serve `model.path` and have no other user.
        python: interpreter of the environment in which SGLang is installed; one server per actor is started with it.
        args: arguments of `sglang.launch_server` by name: {mem_fraction_static: 0.8}; true for a switch.
        environment: environment variables of the server that is started.
        weights: how the servers get new weights: `disk`, `tensor` or `group` (weights.py).
        weights_dir: for `disk`: a folder that servers on other hosts see too; default: shared memory of this host.
        group_backend: for `group`: `nccl` between GPUs, `gloo` on CPUs.
    """
    from asyncrl.model import resolve_path

    if (urls is None) == (python is None):
        raise ConfigError(INSTALL if urls is None else "actors.engine_options: give urls or python, not both.")
    if config.actors.truncated:
        raise ConfigError(
            "actors.top_p, actors.top_k and actors.min_p: SGLang reports logprobs of the whole distribution, not of "
            "the truncated one. Leave them off, or use the engine vllm or hf."
        )
    carriers: dict[str, Callable[[], Carrier]] = {
        "disk": lambda: DiskCarrier(model),
        "tensor": TensorCarrier,
        "group": lambda: GroupCarrier(group_backend, own_address(chosen[0]), config.launch.start_s),
    }
    if weights not in carriers:
        raise ConfigError(f"actors.engine_options.weights is {weights!r}, expected one of {', '.join(carriers)}.")
    _check_carrier(weights, weights_dir, args or {})
    if (args or environment) and python is None:
        raise ConfigError("actors.engine_options: args and environment are for a server that `python` starts.")
    model, process = resolve_path(config.model), None
    if python is None:
        chosen = own_urls(urls or (), config.actors.count)
    else:
        port = free_port()
        chosen = (f"http://127.0.0.1:{port}",)
        process = _process(config, python, model, port, args or {}, environment or {})
    settings = ServerSettings(
        model=model,
        max_tokens=config.env.max_tokens,
        urls=chosen,
        start_s=config.launch.start_s,
        weights_dir=Path(weights_dir) if weights_dir else None,
    )
    return ServerEngine(SGLang(), carriers[weights](), settings, process)


def _process(
    config: Config, python: str, model: Path, port: int, args: Mapping[str, Any], environment: Mapping[str, str]
) -> ServerProcess:
    if shutil.which(python) is None:
        raise ConfigError(f"actors.engine_options.python is {python!r}: there is no such interpreter. {INSTALL}")
    # The model may have no position for the margin, which is never used.
    longer = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    return ServerProcess(command(config, python, model, port, args), longer | dict(environment))


def _check_carrier(weights: str, weights_dir: str | None, args: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that do not suit the way in which the servers get their weights."""
    if weights == "disk":
        return
    if weights_dir is not None:
        raise ConfigError(
            f"actors.engine_options.weights_dir is for weights `disk`, not for {weights!r}: leave it out."
        )
    if max(int(args.get(name, 1)) for name in ("tp", "tp_size", "dp", "dp_size")) > 1:
        raise ConfigError(f"actors.engine_options.weights {weights!r} is for servers of one rank: use disk.")


def command(config: Config, python: str, model: Path, port: int, args: Mapping[str, Any]) -> list[str]:
    """The command that starts a server. Raises ConfigError when `args` sets what asyncrl sets itself."""
    own: dict[str, Any] = {
        "model_path": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": config.model.dtype,
        # Longer than a row: at its own limit SGLang ends a request as aborted.
        "context_length": config.env.max_tokens + MARGIN,
        "max_running_requests": config.actors.most_slots,
        "skip_tokenizer_init": True,
        # With ignore_eos SGLang ignores stop tokens too; so the model gets no end token, and only stop tokens end it.
        "json_model_override_args": '{"eos_token_id": null}',
        "incremental_streaming_output": True,
        "skip_server_warmup": True,
    }
    if taken := sorted(args.keys() & own.keys()):
        raise ConfigError(
            f"actors.engine_options.args: {taken[0]} is set by asyncrl. Remove it; the sections model, env and actors "
            "decide it."
        )
    flags: list[str] = []
    for name, value in {**own, **args}.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not False and value is not None:
            flags += [flag, str(value)]
    return [python, "-m", "sglang.launch_server", *flags]


class SGLang:
    """The HTTP interface of SGLang 0.5.23."""

    name, health = "sglang", "/health"

    def generate(self, request: str, prompt: list[int], n: int, sampling: Sampling, salt: str) -> tuple[str, Any]:
        params = {
            "max_new_tokens": n,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        return "/generate", {
            "rid": request,
            "input_ids": prompt,
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "cache_salt": salt,
        }

    def take(self, chunk: Any, output: Output) -> None:
        """A chunk holds the new tokens, or all so far: that depends on how the server was started."""
        meta = chunk["meta_info"]
        new = list(chunk.get("output_ids") or ())
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
        if len(new) == meta["completion_tokens"]:
            output.ids, output.logprobs = new, logprobs
        else:
            output.ids += new
            output.logprobs += logprobs[len(logprobs) - len(new) :]
        if meta.get("finish_reason"):
            output.reason = meta["finish_reason"]["type"]
            output.why = str(meta["finish_reason"].get("message", ""))
            output.spans = meta.get("weight_versions") or []

    def abort(self, request: str) -> tuple[str, Any]:
        return "/abort_request", {"rid": request}

    def pause(self, recompute_kv: bool) -> tuple[str, Any]:
        return "/pause_generation", {"mode": "retract" if recompute_kv else "in_place"}

    def resume(self) -> tuple[str, Any]:
        return "/continue_generation", {}

    def name_version(self, version: str) -> tuple[str, Any]:
        return "/update_weight_version", {"new_version": version, "abort_all_requests": False}

    def refused(self, reply: Any) -> str:
        return "" if reply.get("success", True) else str(reply.get("message"))
