"""What asyncrl does inside vLLM's worker processes. vLLM mixes the class into its worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.weights.protocol import WeightsVersion
from asyncrl.weights.shm import ShmWeights


class WorkerExtension:
    """Methods of vLLM's worker, called by name through its collective_rpc, between two steps."""

    model_runner: Any

    def asyncrl_load(self, path: str, digest: str) -> bool:
        """Copy the weights of a published file into the model. False: there is no such file (any more).

        The caller, who has it mapped, has verified its bytes and found that they fit.
        """
        try:
            weights = ShmWeights(Path(path), WeightsVersion(0, 0, digest), verify_bytes=False)
        except FileNotFoundError:
            return False
        self.reload_weights(weights_iterator=weights.tensors(), is_checkpoint_format=True)  # type: ignore[attr-defined]
        self._asyncrl_pack_tied_head()
        weights.close()
        return True

    def asyncrl_record(self, path: str, rows: int, room: int) -> bool:
        """Sample by seed and write logprobs to the board at `path`. False: this worker's sampling is vLLM's own."""
        from asyncrl.actors.engines.vllm_sampler import install

        return install(self.model_runner, Path(path), rows, room)

    def _asyncrl_pack_tied_head(self) -> None:
        """On a CPU a head that is tied to the embedding keeps, over vLLM's reload, the matrix packed from the old one.

        It has no weights of its own to be loaded, so the reload passes it by (layerwise.py of vLLM 0.32) and
        logits come silently from the new model's layers and the old model's head.
        """
        model = self.model_runner.get_model()
        config = self.model_runner.model_config.hf_text_config
        if self.model_runner.device.type != "cpu" or not getattr(config, "tie_word_embeddings", False):
            return
        head = model.lm_head
        head.weight = model.model.embed_tokens.weight
        if hasattr(head, "_already_called_process_weights_after_loading"):
            del head._already_called_process_weights_after_loading
        head.quant_method.process_weights_after_loading(head)
