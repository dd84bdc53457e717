"""The old path of `WorkerExtension`, for `vllm serve --worker-extension-cls`; kept for one release."""

import warnings

from asyncrl.actors.engines.vllm.worker import WorkerExtension

__all__ = ["WorkerExtension"]

warnings.warn(
    "asyncrl.actors.engines.vllm_worker is now asyncrl.actors.engines.vllm.worker: give vllm serve "
    "--worker-extension-cls asyncrl.actors.engines.vllm.worker.WorkerExtension",
    DeprecationWarning,
    stacklevel=2,
)
