"""The path of `WorkerExtension` before version 0.2, for `vllm serve --worker-extension-cls`; removed with 0.3."""

import warnings

from asyncrl.actors.engines.vllm.worker import WorkerExtension

__all__ = ["WorkerExtension"]

warnings.warn(
    "asyncrl.actors.engines.vllm_worker is now asyncrl.actors.engines.vllm.worker: give vllm serve "
    "--worker-extension-cls asyncrl.actors.engines.vllm.worker.WorkerExtension",
    DeprecationWarning,
    stacklevel=2,
)
