"""This rank's pieces of a model, from the whole of it in Hugging Face's form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.checkpointing import Checkpointing
from asyncrl.learner.backends.hf.scorer import differs
from asyncrl.learner.backends.megatron.groups import Groups, Options
from asyncrl.learner.backends.megatron.model import Decoder, build
from asyncrl.learner.backends.megatron.names import Layout, from_hf
from asyncrl.learner.backends.megatron.scorer import Scorer
from asyncrl.learner.backends.protocol import Packed, Scores


class Builder:
    """Builds all models of one process. Every rank reads all of a model and keeps its pieces."""

    def __init__(self, config: Config, options: Options, groups: Groups, device: torch.device) -> None:
        self.options, self.groups, self.device = options, groups, device
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._temperature = config.actors.temperature

    def decoder(self, source: PreTrainedModel, layout: Layout, checkpointing: Checkpointing = "none") -> Decoder:
        """With the weights of `source`. Collective."""
        with self.on_device():
            decoder = build(source.config, layout, self.options, self.groups, self.dtype, checkpointing)
        decoder.to(self.device)
        state, tensor = source.state_dict(), self.groups.tensor
        with torch.no_grad():
            for name, parameter in decoder.named():
                parameter.copy_(from_hf(name, state.__getitem__, layout, tensor.rank(), tensor.size()))
        return decoder

    def scorer(self, decoder: Decoder, run: nn.Module, layout: Layout) -> Scorer:
        return Scorer(decoder, run, layout, self._temperature, self.groups.tensor)

    def frozen(self, source: PreTrainedModel, layout: Layout) -> Scorer:
        decoder = self.decoder(source, layout).requires_grad_(False)
        return self.scorer(decoder, decoder, layout)

    def check(self, source: PreTrainedModel, score: Callable[[Packed], Scores], field: str, path: str) -> None:
        """Compares `score`, of the pieces, with the model's own forward pass, as `check` of hf/scorer.py does. Raises
        ConfigError."""
        worst = differs(source, score, self._temperature)
        if not worst < (0.3 if self.dtype == torch.bfloat16 else 1e-2):
            raise ConfigError(
                f"{field} is {path!r}, a {type(source).__name__}: as a model of Megatron-core its rows differ from its "
                f"own forward pass by {worst:.2g} nats. Use learner.backend fsdp2."
            )

    def on_device(self) -> AbstractContextManager[object]:
        """Entered around calls of Megatron that name the GPU."""
        if self.device.type == "cuda":
            return nullcontext()
        from asyncrl.learner.backends.megatron.cpu import OnCpu

        return OnCpu()
