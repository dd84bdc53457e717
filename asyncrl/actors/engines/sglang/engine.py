"""SGLang as the engine: a server that this actor starts, or servers that run already, over SGLang's own HTTP interface.

SGLang pins another torch than asyncrl, so it always lives in another environment (`python`). Its pause modes are what
`weights.kv` means: `retract` frees the KV cache and prefills again, `in_place` keeps it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.actors.engines.protocol import Sampling
from asyncrl.actors.engines.servers.dialect import Answer, Carrier
from asyncrl.actors.engines.servers.engine import ServerEngine, ServerSettings, own_urls
from asyncrl.actors.engines.servers.process import ServerProcess, free_port
from asyncrl.actors.engines.sglang.weights import Disk, Group, Handles, own_address
from asyncrl.config import Config
from asyncrl.errors import ConfigError

MARGIN = 8
INSTALL = (
    "actors.engine is 'sglang', which needs a server. SGLang pins another torch than asyncrl and lives in an "
    "environment of its own: there, pip install 'sglang==0.5.23'; then set actors.engine_options.python to that "
    "environment's interpreter, or actors.engine_options.urls to servers that run (docs/engines.md)."
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
        urls: servers that run, one or more per actor, serving `model.path`; nobody else may use them.
        python: interpreter of the environment in which SGLang is installed: one server per actor is started there.
        args: of `sglang.launch_server`, by their names: {mem_fraction_static: 0.8}; true for a switch.
        environment: variables of the server that is started.
        weights: how they get new weights: `disk`, `tensor` or `group` (weights.py).
        weights_dir: of `disk`: a folder that servers on other hosts see too; default: shared memory of this host.
        group_backend: of `group`: `nccl` between GPUs, `gloo` on CPUs.
    """
    from asyncrl.model import resolve_path

    if (urls is None) == (python is None):
        raise ConfigError(INSTALL if urls is None else "actors.engine_options: give urls or python, not both.")
    if config.actors.top_p < 1 or config.actors.top_k:
        raise ConfigError(
            "actors.top_p and actors.top_k: SGLang reports logprobs of the whole distribution, not of what truncation "
            "leaves. Leave them off, or use the engine vllm."
        )
    process = None
    model = resolve_path(config.model)
    carriers: dict[str, Callable[[], Carrier]] = {
        "disk": lambda: Disk(model),
        "tensor": Handles,
        "group": lambda: Group(group_backend, own_address(chosen[0]), config.launch.start_s),
    }
    if weights not in carriers:
        raise ConfigError(f"actors.engine_options.weights is {weights!r}, expected one of {', '.join(carriers)}.")
    if weights_dir is not None and weights != "disk":
        raise ConfigError(f"actors.engine_options.weights_dir is of weights `disk`, not of {weights!r}: leave it out.")
    ranks = config.actors.engine_options.get("args", {})
    if weights != "disk" and max(int(ranks.get(name, 1)) for name in ("tp", "tp_size", "dp", "dp_size")) > 1:
        raise ConfigError(f"actors.engine_options.weights {weights!r} is for servers of one rank: use disk.")
    if python is not None:
        if shutil.which(python) is None:
            raise ConfigError(f"actors.engine_options.python is {python!r}: there is no such interpreter. {INSTALL}")
        port = free_port()
        urls = [f"http://127.0.0.1:{port}"]
        # The model may have no position for the margin, which nothing ever uses.
        longer = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        process = ServerProcess(command(config, python, model, port, args or {}), longer | dict(environment or {}))
    elif args or environment:
        raise ConfigError("actors.engine_options: args and environment are of a server that `python` starts.")
    chosen = tuple(urls or ()) if process else own_urls(urls or (), config.actors.count)
    settings = ServerSettings(
        model=model,
        max_tokens=config.env.max_tokens,
        urls=chosen,
        start_s=config.launch.start_s,
        weights_dir=Path(weights_dir) if weights_dir else None,
    )
    return ServerEngine(SGLang(), carriers[weights](), settings, process)


def command(config: Config, python: str, model: Path, port: int, args: Mapping[str, Any]) -> list[str]:
    """That starts a server. Raises ConfigError when `args` takes what asyncrl decides itself."""
    own: dict[str, Any] = {
        "model_path": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": config.model.dtype,
        # Rows end before: at its own limit SGLang cuts a request short as aborted.
        "context_length": config.env.max_tokens + MARGIN,
        "max_running_requests": config.actors.most_slots,
        "skip_tokenizer_init": True,
        # Told to ignore the end token SGLang ignores stop tokens too. So the model has none, and those asked for end.
        "json_model_override_args": '{"eos_token_id": null}',
        "incremental_streaming_output": True,
        "skip_server_warmup": True,
    }
    if taken := sorted(args.keys() & own.keys()):
        raise ConfigError(
            f"actors.engine_options.args: {taken[0]} is set by asyncrl. Remove it; the sections model, env and actors "
            "decide it."
        )
    said: list[str] = []
    for name, value in {**own, **args}.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            said.append(flag)
        elif value is not False and value is not None:
            said += [flag, str(value)]
    return [python, "-m", "sglang.launch_server", *said]


class SGLang:
    """Release 0.5.23."""

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

    def take(self, chunk: Any, answer: Answer) -> None:
        """Chunks hold what is new, or everything so far, as the server was started."""
        meta = chunk["meta_info"]
        new = list(chunk.get("output_ids") or ())
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
        if len(new) == meta["completion_tokens"]:
            answer.ids, answer.logprobs = new, logprobs
        else:
            answer.ids += new
            answer.logprobs += logprobs[len(logprobs) - len(new) :]
        if meta.get("finish_reason"):
            answer.reason = meta["finish_reason"]["type"]
            answer.why = str(meta["finish_reason"].get("message", ""))
            answer.spans = meta.get("weight_versions") or []

    def abort(self, request: str) -> tuple[str, Any]:
        return "/abort_request", {"rid": request}

    def pause(self, recompute_kv: bool) -> tuple[str, Any]:
        return "/pause_generation", {"mode": "retract" if recompute_kv else "in_place"}

    def resume(self) -> tuple[str, Any]:
        return "/continue_generation", {}

    def name_version(self, version: str) -> tuple[str, Any]:
        return "/update_weight_version", {"new_version": version, "abort_all_requests": False}

    def refused(self, answer: Any) -> str:
        return "" if answer.get("success", True) else str(answer.get("message"))
