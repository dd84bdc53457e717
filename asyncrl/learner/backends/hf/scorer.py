"""A Hugging Face decoder that scores packed rows; every backend of transformers' models computes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.checkpointing import Checkpointing, options
from asyncrl.learner.backends.comparison import TeacherStates, compared
from asyncrl.learner.backends.hf.compute_dtype import ComputeDtype, compute_in
from asyncrl.learner.backends.hf.lora import Adapters
from asyncrl.learner.backends.hf.row_attention import Kernel, ends_of, layout_of
from asyncrl.learner.backends.hf.varlen_attention import NAME as PACKED_ATTENTION
from asyncrl.learner.backends.logprobs import selected_logprobs, sum_of_squared_probabilities
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.learner.backends.recorded import compared_with_recorded
from asyncrl.learner.backends.shared_prefixes import share_prefixes
from asyncrl.learner.distillation.divergence import Comparison


@dataclass(frozen=True, slots=True)
class Source:
    """A model as it was loaded."""

    model: PreTrainedModel
    digest: str = ""
    """Of its weights (lora.py), where something is compared with it later."""


Load = Callable[[], Source]
"""Reads a model; raises ConfigError."""


class Scorer(nn.Module):
    """Its forward pass is all that a backend computes, so that sharding can wrap it as one module."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        adapters: Adapters | None = None,
        compute: torch.dtype = torch.float32,
        activation_checkpointing: Checkpointing = "none",
        digest: str = "",
    ) -> None:
        """Takes over `model`, with the `adapters` in it. `compute`: the dtype of layers and head, up to the logits, as
        engines compute them; what is stored stays float32. `digest`: as of its Source."""
        super().__init__()
        model.set_attn_implementation(PACKED_ATTENTION)
        # With dropout the proximal logprobs would be those of another policy than the one that samples.
        self.model: PreTrainedModel = model.float().eval()
        self.adapters, self.digest = adapters, digest
        self._temperature, self.compute = temperature, ComputeDtype(compute)
        if compute != torch.float32:
            compute_in(model, layers(model), self.compute)
        self.attention: Kernel | None = None
        """None: the one that suits the device (row_attention.py)"""
        if activation_checkpointing != "none":
            model.gradient_checkpointing_enable(options(activation_checkpointing))
            for layer in layers(model):
                # Only the layer's own flag: transformers checkpoints only layers in training mode; dropout stays off.
                layer.training = True

    def forward(self, part: Packed, teacher: TeacherStates | None = None, how: Comparison | None = None) -> Scores:
        """Scores on the device of the weights, from which nothing is read here: the host never waits for it.

        `teacher`, `how`: what the policy is compared with, at the same tokens. With `how` alone it is what a server
        said of them (`part.recorded`).
        """
        device = self.model.get_input_embeddings().weight.device
        token_ids, mask = part.token_ids.cpu(), part.mask.cpu()
        plan = share_prefixes(token_ids, part.lengths)
        sampled = mask.nonzero()[:, 0]
        positions = torch.cat([torch.arange(n) for n in part.lengths])[plan.computed]
        ends = ends_of(plan.segments)
        computed, positions, wanted, before, targets, ends, *seen = _moved(
            device,
            [token_ids[plan.computed], positions, sampled, plan.where[sampled - 1], token_ids[sampled], ends]
            + ([] if plan.seen is None else [plan.seen]),
        )
        kept = None if part.kept is None else part.kept.to(device)
        layout = layout_of(plan.segments, seen[0] if seen else None, ends=ends, kernel=self.attention)
        # Neither a mask nor a cache: with them transformers would silently let rows attend to each other.
        hidden = self.model.base_model(
            input_ids=computed[None], position_ids=positions[None], use_cache=False, layout=layout
        ).last_hidden_state[0]
        weight = self.model.get_output_embeddings().weight
        predicting = hidden.index_select(0, before)

        def on_tokens(x: Tensor) -> Tensor:
            return torch.zeros(len(token_ids), device=device).index_put((wanted,), x)

        logprobs = entropy = torch.zeros(len(token_ids), device=device)
        if "logprobs" in part.wants:
            selected, of_each = selected_logprobs(
                predicting, weight, targets, self._temperature, entropy="entropy" in part.wants, kept=kept
            )
            logprobs = on_tokens(selected)
            entropy = entropy if of_each is None else on_tokens(of_each)
        squares = None
        if "sum_pi_sq" in part.wants:
            squares = on_tokens(sum_of_squared_probabilities(predicting, weight, self._temperature, kept=kept))
        rows = None
        if teacher is not None and how is not None:
            found = compared(predicting, weight, targets, teacher, how, temperature=self._temperature)
            rows = torch.stack([on_tokens(x.float()) for x in found])
        elif part.recorded is not None and how is not None:
            found = compared_with_recorded(
                predicting, weight, part.recorded, how.divergence, temperature=self._temperature
            )
            rows = torch.stack([on_tokens(x.float()) for x in found])
        return Scores(logprobs, entropy, predicting if "hidden" in part.wants else None, squares, rows)


def _moved(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Integers of the CPU on `device`, by one copy."""
    if device.type == "cpu":
        return list(tensors)
    joined = torch.cat([x.flatten() for x in tensors]).to(device)
    parts = torch.split(joined, [x.numel() for x in tensors])
    return [x.view(like.shape) for x, like in zip(parts, tensors, strict=True)]


def scorer_of(config: Config, source: Source, *, compute: torch.dtype = torch.float32) -> Scorer:
    """A scorer of a model, where that lies, in float32, with adapters if configured."""
    model = source.model
    return Scorer(
        model,
        temperature=config.actors.temperature,
        adapters=Adapters(model.float(), config, source.digest) if config.learner.lora.r else None,
        compute=compute,
        activation_checkpointing=config.learner.activation_checkpointing,
        digest=source.digest,
    )


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers. Raises ConfigError for a model that has none by that name."""
    modules = getattr(model.base_model, "layers", None)
    if not isinstance(modules, nn.ModuleList):
        raise ConfigError(f"model.path names a {type(model).__name__}, which has no list of decoder layers (`layers`).")
    return list(modules)


def check(scorer: Scorer, config: Config, field: str = "model.path") -> None:
    """Scores two short rows packed and through the model's own forward pass. What a model family does differently
    (biased or scaled logits, recurrent layers, its own cache) shows here, not as a run that learns nothing. `field`
    names the model in the error. Raises ConfigError."""
    model = scorer.model
    dtype, scorer.compute.dtype = scorer.compute.dtype, torch.float32
    worst = differs(model, scorer, config.actors.temperature)
    model.set_attn_implementation(PACKED_ATTENTION)
    scorer.compute.dtype = dtype
    if not worst < 1e-2:
        raise ConfigError(
            f"{field} is {config.model.path!r}, a {type(model).__name__}: its packed rows differ from its own "
            f"forward pass by {worst:.2g} nats. learner.backend {config.learner.backend} needs a plain causal decoder "
            "(Qwen2, Qwen3, Llama and similar)."
        )


def differs(model: PreTrainedModel, score: Callable[[Packed], Scores], temperature: float) -> float:
    """Largest difference, in nats, between `score` of a pack and the forward pass of each row alone through `model`,
    whose attention is `eager` afterwards."""
    vocabulary, device = model.get_input_embeddings().weight.shape[0], model.get_input_embeddings().weight.device
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocabulary, (n,), generator=generator) for n in (7, 5)]
    mask = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    with torch.no_grad():
        packed = score(Packed(torch.cat(rows), mask, (7, 5))).logprobs.cpu()
        model.set_attn_implementation("eager")
        alone = [model(row[None].to(device), use_cache=False).logits[0].float().cpu() for row in rows]
    expected = torch.cat(
        [
            torch.cat([torch.zeros(1), (x[:-1] / temperature).log_softmax(-1).gather(1, row[1:, None])[:, 0]])
            for row, x in zip(rows, alone, strict=True)
        ]
    )
    return float((packed - expected).abs().max())


def adamw(module: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices, not for norms and biases."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.learner.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.learner.lr, betas=config.learner.betas, fused=True
    )
