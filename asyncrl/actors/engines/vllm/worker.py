"""asyncrl's extension of vLLM's workers: vLLM mixes the class into its worker class."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import asyncrl.actors.engines.vllm.transfer  # noqa: F401  (registers its backend, before vLLM creates it)
from asyncrl.actors.engines.vllm import cpu_load
from asyncrl.actors.engines.vllm.cpu_load import pack_tied_head
from asyncrl.weights.local.shm import ShmWeights
from asyncrl.weights.protocol import WeightsVersion

log = logging.getLogger(__name__)


class WorkerExtension:
    """Methods of vLLM's worker, called by name through collective_rpc, between two steps."""

    model_runner: Any

    def asyncrl_load(self, path: str, digest: str) -> bool:
        """Copy the weights of a published file into the model. False: the file is gone.

        The caller has mapped the file, verified its bytes, and checked that they fit the model.
        """
        try:
            weights = ShmWeights(Path(path), WeightsVersion(0, 0, digest), verify_bytes=False)
        except FileNotFoundError:
            return False
        model = self.model_runner.get_model()
        if cpu_load.suits(self):
            cpu_load.load(model, dict(weights.tensors()), self.model_runner.model_config.hf_text_config)
        else:
            self.reload_weights(weights_iterator=weights.tensors(), is_checkpoint_format=True)  # type: ignore[attr-defined]
        pack_tied_head(model, self.model_runner.model_config)
        weights.close()
        return True

    def asyncrl_synchronize(self) -> bool:
        """Wait until the GPU has done all that was asked of it, so that memory which it read may be written."""
        import torch

        device = next(self.model_runner.get_model().parameters()).device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return True

    def asyncrl_received(self) -> bool:
        """Whether all chunks of this update have arrived (transfer.py)."""
        received: bool = self.weight_transfer_engine.received  # type: ignore[attr-defined]
        return received

    def asyncrl_record(self, path: str, rows: int, room: int) -> bool:
        """Record the logprobs of sampled tokens on the board at `path`. False: this worker keeps vLLM's sampler, and
        vLLM reports them."""
        from asyncrl.actors.engines.vllm import gpu_sampler

        if self.model_runner.device.type == "cpu":
            from asyncrl.actors.engines.vllm.sampler import install

            return install(self.model_runner, Path(path), rows, room)
        if why := gpu_sampler.install(self.model_runner, Path(path), rows, room):
            log.warning("vLLM reports logprobs itself, which is slower: of its model runner, %s", why)
        return not why
