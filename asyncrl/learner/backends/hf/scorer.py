"""A Hugging Face decoder that scores packed rows; every backend of transformers' models computes with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.hf.lora import Adapters
from asyncrl.learner.backends.hf.varlen_attention import NAME as PACKED_ATTENTION
from asyncrl.learner.backends.hf.varlen_attention import Layout
from asyncrl.learner.backends.logprobs import selected_logprobs, sum_of_squared_probabilities
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.learner.backends.shared_prefixes import share_prefixes
from asyncrl.model import load_model


class Scorer(nn.Module):
    """Its forward pass is all that a backend computes, so that sharding and autocast can wrap it as one module."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        adapters: Adapters | None = None,
        autocast: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        """Takes over `model`, with the `adapters` in it. `autocast`: matrix products in bfloat16, including the head's,
        as engines compute them; what is stored stays float32."""
        super().__init__()
        model.set_attn_implementation(PACKED_ATTENTION)
        # With dropout the proximal logprobs would be those of another policy than the one that samples.
        self.model: PreTrainedModel = model.float().eval()
        self.adapters = adapters
        self._temperature, self.autocast = temperature, autocast
        if activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in layers(model):
                # Only the layer's own flag: transformers checkpoints only layers in training mode; dropout stays off.
                layer.training = True

    def forward(self, part: Packed) -> Scores:
        """Scores on the device of the weights."""
        device = self.model.get_input_embeddings().weight.device
        plan = share_prefixes(part.token_ids.cpu(), part.lengths)
        token_ids = part.token_ids.to(device)
        wanted = part.mask.to(device).nonzero()[:, 0]
        positions = torch.cat([torch.arange(n) for n in part.lengths])[plan.computed].to(device)
        computed, where = plan.computed.to(device), plan.where.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            # Neither a mask nor a cache: with them transformers would silently let rows attend to each other.
            hidden = self.model.base_model(
                input_ids=token_ids[computed][None],
                position_ids=positions[None],
                use_cache=False,
                layout=Layout(plan.segments, None if plan.seen is None else plan.seen.to(device)),
            ).last_hidden_state[0]
        weight = self.model.get_output_embeddings().weight
        predicting = hidden.index_select(0, where[wanted - 1])
        of_head = predicting.bfloat16() if self.autocast else predicting  # the last norm's output is float32

        def on_tokens(x: Tensor) -> Tensor:
            return torch.zeros(len(token_ids), device=device).index_put((wanted,), x)

        logprobs = entropy = torch.zeros(len(token_ids), device=device)
        if "logprobs" in part.wants:
            selected = selected_logprobs(of_head, weight, token_ids[wanted], self._temperature)
            logprobs, entropy = map(on_tokens, selected)
        squares = None
        if "sum_pi_sq" in part.wants:
            squares = on_tokens(sum_of_squared_probabilities(of_head, weight, self._temperature))
        return Scores(logprobs, entropy, predicting if "hidden" in part.wants else None, squares)


def scorer_of(config: Config, model: PreTrainedModel | None, *, autocast: bool) -> Scorer:
    """A scorer of `model`, or of the one in `config.model`, on the CPU in float32, with adapters if configured."""
    model = model or load_model(config.model, torch.float32)
    return Scorer(
        model,
        temperature=config.actors.temperature,
        adapters=Adapters(model.float(), config) if config.learner.lora.r else None,
        autocast=autocast,
        activation_checkpointing=config.learner.activation_checkpointing,
    )


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers. Raises ConfigError for a model that has none by that name."""
    modules = getattr(model.base_model, "layers", None)
    if not isinstance(modules, nn.ModuleList):
        raise ConfigError(f"model.path names a {type(model).__name__}, which has no list of decoder layers (`layers`).")
    return list(modules)


def check(scorer: Scorer, config: Config) -> None:
    """Scores two short rows packed and through the model's own forward pass. What a model family does differently
    (biased or scaled logits, recurrent layers, its own cache) shows here, not as a run that learns nothing. Raises
    ConfigError."""
    model = scorer.model
    autocast, scorer.autocast = scorer.autocast, False
    worst = differs(model, scorer, config.actors.temperature)
    model.set_attn_implementation(PACKED_ATTENTION)
    scorer.autocast = autocast
    if not worst < 1e-2:
        raise ConfigError(
            f"model.path is {config.model.path!r}, a {type(model).__name__}: its packed rows differ from its own "
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
