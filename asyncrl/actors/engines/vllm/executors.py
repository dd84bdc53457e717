"""vLLM's executors, which end with the process that started the engine, however that process ends.

vLLM's engine core outlives a front end that is killed. An executor is the one part that a caller can put into that
process by name, and it is created first. Worker processes of several GPUs are ended with the core by vLLM itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from asyncrl.actors.engines.vllm.settings import OWNER

PERIOD_S = 0.25


def end_with_owner() -> None:
    """From now on, kill this process when its parent, which must be the owner, is gone.

    A dead parent shows as another parent id. PR_SET_PDEATHSIG would also fire when only a thread of the parent ends.
    """
    owner = int(os.environ[OWNER])

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(PERIOD_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="owner", daemon=True).start()


class OwnedUniProcExecutor(UniProcExecutor):  # type: ignore[misc]
    """One device: the worker lives in the engine core's process."""

    def _init_executor(self) -> None:
        end_with_owner()
        super()._init_executor()


class OwnedMultiprocExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Several devices: one worker process each."""

    def _init_executor(self) -> None:
        end_with_owner()
        super()._init_executor()
