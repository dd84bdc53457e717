"""Starting and ending vLLM's processes, and what they report of themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import psutil

from asyncrl.actors.engines.protocol import EngineDied
from asyncrl.actors.engines.vllm_settings import VLLMSettings, engine_arguments, engine_environment, environment
from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)

SHUTDOWN_S = 5.0
"""What the engine core may take to end in order before it is killed."""


class Stats:
    """What vLLM reports after each step, in the shape of its stat loggers."""

    def __init__(self) -> None:
        self.waiting = 0
        self.kv_use = 0.0
        self.generated = self.prefilled = self.prefix_reused = self.preempted = 0

    def factory(self, vllm_config: Any, engine_index: int = 0) -> Stats:
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, **others: Any) -> None:
        if scheduler_stats is not None:
            self.waiting = scheduler_stats.num_waiting_reqs
            self.kv_use = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.generated += iteration_stats.num_generation_tokens
            self.prefilled += iteration_stats.prompt_token_stats.computed
            self.prefix_reused += iteration_stats.prompt_token_stats.cached_tokens
            self.preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...


def start_vllm(settings: VLLMSettings, cpu: bool, stats: Stats) -> Any:
    """A running AsyncLLM; blocks until its core is ready. Raises ConfigError for arguments that vLLM refuses,
    EngineDied when it does not start."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from asyncrl.actors.engines.vllm_owned import OwnedMultiprocExecutor, OwnedUniProcExecutor

    arguments = engine_arguments(settings, cpu)
    executor = OwnedUniProcExecutor if settings.tensor_parallel == 1 else OwnedMultiprocExecutor
    with environment(engine_environment(settings, cpu)):
        try:
            chosen = AsyncEngineArgs(distributed_executor_backend=executor, **arguments).create_engine_config()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"actors.engine_options: vLLM refuses its arguments: {error}") from error
        try:
            return AsyncLLM.from_vllm_config(chosen, stat_loggers=[stats.factory], disable_log_stats=True)
        except (RuntimeError, TimeoutError, OSError) as error:
            raise EngineDied(f"vLLM did not start ({error}); the log says why, above") from error


async def end_vllm(llm: Any) -> None:
    """Within twice SHUTDOWN_S none of its processes is left."""
    processes = _processes(llm)
    try:
        await asyncio.wait_for(asyncio.to_thread(llm.shutdown, SHUTDOWN_S), 2 * SHUTDOWN_S)
    except TimeoutError:
        log.error("vLLM did not end within %g s and is killed", 2 * SHUTDOWN_S)
    finally:
        _kill(processes)


def _processes(llm: Any) -> list[psutil.Process]:
    found = []
    for core in llm.engine_core.resources.engine_manager.processes:
        try:
            process = psutil.Process(core.pid)
            found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
