"""One process, plain torch: float32 master weights, packed rows, AdamW.

With `model.dtype: bfloat16` matrix products run in bfloat16 (autocast) and weights are published in it; what the
optimizer updates stays float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.learner.backends.varlen_attention import NAME as PACKED_ATTENTION
from asyncrl.learner.logprobs import selected_logprobs
from asyncrl.learner.prefixes import share_prefixes
from asyncrl.model import load_folder, load_model


class TorchBackend:
    dp_rank, dp_size = 0, 1

    def __init__(self, config: Config, model: PreTrainedModel | None = None, *, device: str | None = None) -> None:
        """Builds from `config.model`, or around `model`, which it then owns. Raises ConfigError for a model whose
        packed rows do not score as its own forward pass does."""
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._temperature = config.actors.temperature
        self._model = _prepared(model or load_model(config.model, torch.float32), self.device)
        self._check(config)
        self._reference: PreTrainedModel | None = None
        if config.learner.kl_coef > 0:
            self._reference = _prepared(load_model(config.model, torch.float32), self.device).requires_grad_(False)
        self._optimizer = _adamw(self._model, config)
        self._marked: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def logprobs(self, parts: Sequence[Packed], *, reference: bool = False) -> list[Scores]:
        model = self._reference if reference else self._model
        if model is None:
            raise ValueError("there is no reference model: learner.kl_coef is 0")
        with torch.no_grad():
            return [self._score(model, part) for part in parts]

    def accumulate(self, parts: Sequence[Packed], loss: Callable[[int, Scores], Tensor]) -> None:
        for i, part in enumerate(parts):
            loss(i, self._score(self._model, part)).backward()  # type: ignore[no-untyped-call]

    def clip(self, max_norm: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm))

    def apply(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.discard()

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def mark(self) -> None:
        self._marked = copy.deepcopy((self._model.state_dict(), self._optimizer.state_dict()))

    def rollback(self) -> None:
        if self._marked is None:
            raise ValueError("rollback without mark")
        self._model.load_state_dict(self._marked[0])
        self._optimizer.load_state_dict(self._marked[1])

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return values

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        seen = set()
        for name, tensor in self._model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def save(self, folder: Path) -> None:
        self._model.save_pretrained(folder / "hf")
        torch.save(self._optimizer.state_dict(), folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        saved = load_folder(folder / "hf", torch.float32, f"the checkpoint {folder} is asked for").state_dict()
        mine = self._model.state_dict()
        different = sorted(n for n in saved.keys() | mine.keys() if _shape(saved, n) != _shape(mine, n))
        if different:
            raise RunError(
                f"checkpoint {folder} is of another model: {different[0]} is {_shape(saved, different[0])} there and "
                f"{_shape(mine, different[0])} in model.path. Resume with the model that the run was started with."
            )
        self._model.load_state_dict(saved)
        self._optimizer.load_state_dict(torch.load(folder / "optimizer.pt", self.device, weights_only=True))

    def _score(self, model: PreTrainedModel, part: Packed) -> Scores:
        plan = share_prefixes(part.token_ids.cpu(), part.lengths)
        token_ids = part.token_ids.to(self.device)
        wanted = part.mask.to(self.device).nonzero()[:, 0]
        positions = torch.cat([torch.arange(n) for n in part.lengths])[plan.computed].to(self.device)
        computed, where = plan.computed.to(self.device), plan.where.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            # Never a mask, never a cache: transformers would silently let rows see each other.
            hidden = model.base_model(
                input_ids=token_ids[computed][None],
                position_ids=positions[None],
                use_cache=False,
                segments=plan.segments,
            ).last_hidden_state[0]
        weight = model.get_output_embeddings().weight
        predicting = hidden.index_select(0, where[wanted - 1])
        found = selected_logprobs(predicting, weight, token_ids[wanted], self._temperature)
        on_tokens = [torch.zeros(len(token_ids), device=self.device).index_put((wanted,), x) for x in found]
        return Scores(*on_tokens)

    def _check(self, config: Config) -> None:
        """Two short rows, packed and through the model's own forward: whatever a family does differently (biased or
        scaled logits, recurrent layers, a cache of its own) shows here, and not as a run that learns nothing."""
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(0, vocabulary, (n,), generator=generator) for n in (7, 5)]
        mask = torch.cat([torch.arange(len(row)) > 0 for row in rows])
        dtype, self._dtype = self._dtype, torch.float32
        packed = self.logprobs([Packed(torch.cat(rows), mask, (7, 5))])[0].logprobs.cpu()
        self._dtype = dtype
        self._model.set_attn_implementation("eager")
        with torch.no_grad():
            alone = [self._model(row[None].to(self.device), use_cache=False).logits[0].float().cpu() for row in rows]
        self._model.set_attn_implementation(PACKED_ATTENTION)
        expected = torch.cat(
            [
                torch.cat([torch.zeros(1), (x[:-1] / self._temperature).log_softmax(-1).gather(1, row[1:, None])[:, 0]])
                for row, x in zip(rows, alone, strict=True)
            ]
        )
        worst = float((packed - expected).abs().max())
        if not worst < 1e-2:
            raise ConfigError(
                f"model.path is {config.model.path!r}, a {type(self._model).__name__}: its packed rows differ from its "
                f"own forward pass by {worst:.2g} nats. The torch backend needs a plain causal decoder (Qwen2, Qwen3, "
                "Llama and their like)."
            )


def _prepared(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    model.set_attn_implementation(PACKED_ATTENTION)
    # Dropout would make the proximal logprobs another policy's than the one that samples.
    prepared: PreTrainedModel = model.float().to(device).eval()
    return prepared


def _adamw(model: PreTrainedModel, config: Config) -> torch.optim.AdamW:
    """Matrices decay, norms and biases do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.learner.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.learner.lr, betas=config.learner.betas, fused=True
    )


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None
