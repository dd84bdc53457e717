"""Starting and ending vLLM's processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import psutil

from asyncrl.actors.engines.protocol import EngineDied
from asyncrl.actors.engines.vllm.settings import VLLMSettings, engine_arguments, engine_environment, environment
from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)

SHUTDOWN_S = 2.0
"""Seconds for the engine core to end in order before it is killed."""


def start_vllm(settings: VLLMSettings, cpu: bool) -> Any:
    """A running AsyncLLM. Blocks until its core is ready: call it in a thread without an event loop.

    Raises ConfigError for arguments that vLLM refuses, EngineDied when it does not start.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from asyncrl.actors.engines.vllm.executors import OwnedMultiprocExecutor, OwnedUniProcExecutor

    arguments = engine_arguments(settings, cpu)
    executor = OwnedUniProcExecutor if settings.tensor_parallel == 1 else OwnedMultiprocExecutor
    with environment(engine_environment(settings, cpu)):
        try:
            chosen = AsyncEngineArgs(distributed_executor_backend=executor, **arguments).create_engine_config()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"actors.engine_options: vLLM refuses its arguments: {error}") from error
        try:
            return AsyncLLM.from_vllm_config(chosen)
        except (RuntimeError, TimeoutError, OSError) as error:
            raise EngineDied(f"vLLM did not start ({error}); the log says why, above") from error


async def end_vllm(llm: Any) -> None:
    """End vLLM; after at most twice SHUTDOWN_S none of its processes is left."""
    processes = _processes(llm)
    try:
        await asyncio.wait_for(asyncio.to_thread(llm.shutdown, SHUTDOWN_S), 2 * SHUTDOWN_S)
    except TimeoutError:
        log.error("vLLM did not end within %g s and is killed", 2 * SHUTDOWN_S)
    finally:
        _kill(processes)


def _processes(llm: Any) -> list[psutil.Process]:
    processes = []
    for core in llm.engine_core.resources.engine_manager.processes:
        try:
            process = psutil.Process(core.pid)
            processes += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return processes


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
