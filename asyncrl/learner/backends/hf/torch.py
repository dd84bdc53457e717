"""One process, plain torch: float32 master weights, packed rows, AdamW.

With `model.dtype: bfloat16` layers and head compute in bfloat16 (compute_dtype.py) and weights are published in it;
gradients and what the optimizer updates stay float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from asyncrl.checkpoint_names import as_checkpoint
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.backends.export import export
from asyncrl.learner.backends.hf.compile import compile_layers
from asyncrl.learner.backends.hf.lora import Adapters, digest_of, refuse_adapters, weights
from asyncrl.learner.backends.hf.moving import FILE as AVERAGE
from asyncrl.learner.backends.hf.moving import moving_of, refuse_without_average
from asyncrl.learner.backends.hf.reference import Reference
from asyncrl.learner.backends.hf.scorer import Load, Scorer, Source, adamw, check, scorer_of
from asyncrl.learner.backends.hf.teacher import FIELD as TEACHER
from asyncrl.learner.backends.hf.teacher import States, Taught, comparison_of, teacher_of
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.model import load_folder, load_model


class TorchBackend:
    dp_size = 1

    def __init__(self, config: Config, model: PreTrainedModel | None = None, *, device: str | None = None) -> None:
        """Builds from `config.model`, or around `model`, which it then owns. Raises ConfigError for a model whose
        packed rows do not score as its own forward pass does."""
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._scorer = self._build(config, lambda: source_of(config, model))
        self._model = self._scorer.model
        self._adapters = self._scorer.adapters
        self._reference: SecondModel | Reference | None = None
        self._reference_every = config.learner.reference_every
        if config.learner.kl_coef > 0 and self._adapters is not None:
            self._reference = Reference(self._scorer)
        elif config.learner.kl_coef > 0:
            self._reference = SecondModel(self._build(config, lambda: source_of(config)), self._scorer)
        self._moving = moving_of(config.learner, self._scorer, lambda: self._build(config, lambda: source_of(config)))
        self._teacher: States | None = self._moving or teacher_of(
            config, lambda taught, load: self._build(taught, load, TEACHER)
        )
        self.teacher_digest = self._teacher.digest if self._teacher else ""
        self._policy = (
            Taught(self._scorer, self._teacher, comparison_of(config.learner.teacher))
            if config.learner.teacher.path
            else self._scorer
        )
        self._optimizer = adamw(self._scorer, config)
        self._marked: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def logprobs(self, parts: Sequence[Packed], *, reference: bool = False) -> list[Scores]:
        with torch.no_grad(), self._scoring(reference) as scorer:
            return [scorer(part) for part in parts]

    def refresh_reference(self) -> None:
        if self._reference is None:
            raise ValueError("there is no reference model: learner.kl_coef is 0")
        self._reference.refresh()

    def move_teacher(self) -> None:
        if self._moving is None:
            raise ValueError("there is no teacher that moves: learner.teacher.path is another than policy")
        self._moving.move()

    def accumulate(self, parts: Sequence[Packed], loss: Callable[[int, Scores], Tensor]) -> None:
        for i, part in enumerate(parts):
            loss(i, self._policy(part)).backward()  # type: ignore[no-untyped-call]

    def visit(self, parts: Sequence[Packed], see: Callable[[int, Scores], object]) -> None:
        with torch.no_grad():
            for i, part in enumerate(parts):
                see(i, self._policy(part))

    def add_up(self, mine: Tensor) -> Tensor:
        return mine

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
        self._marked = copy.deepcopy((self._trained(), self._optimizer.state_dict()))

    def rollback(self) -> None:
        if self._marked is None:
            raise ValueError("rollback without mark")
        self._model.load_state_dict(self._marked[0], strict=self._adapters is None)
        self._optimizer.load_state_dict(self._marked[1])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        merged = ((weight.name, weight.merged(lambda x: x)) for weight in weights(self._model))
        for name, tensor in as_checkpoint(self._model, merged):
            yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def save(self, folder: Path) -> None:
        self.snapshot()(folder)

    def snapshot(self) -> Callable[[Path], None]:
        optimizer = on_cpu(self._optimizer.state_dict())
        model = self._snapshot_of_adapters(self._adapters) if self._adapters else self._snapshot_of_model()
        reference = None
        if self._reference is not None and self._reference_every:
            reference = on_cpu(self._reference.state_dict())
        average = on_cpu(self._moving.state_dict()) if self._moving and self._moving.averages else None

        def write(folder: Path) -> None:
            model(folder)
            torch.save(optimizer, folder / "optimizer.pt")
            if average is not None:
                torch.save(average, folder / AVERAGE)
            if reference is not None:
                torch.save(reference, folder / "reference.pt")

        return write

    def _snapshot_of_model(self) -> Callable[[Path], None]:
        state = on_cpu(self._model.state_dict())
        return lambda folder: self._model.save_pretrained(folder / "hf", state_dict=state)

    def _snapshot_of_adapters(self, adapters: Adapters) -> Callable[[Path], None]:
        # The base never changes, so it is read while training continues.
        copies = [weight.snapshot(on_cpu) for weight in weights(self._model)]

        def write(folder: Path) -> None:
            export(self._model, ((w.name, w.merged(Tensor.cpu)) for w in copies), folder / "hf")
            adapters.write(copies, Tensor.cpu, folder)

        return write

    def load(self, folder: Path) -> None:
        if self._adapters is not None:
            self._adapters.read(folder, weights(self._model))
        else:
            refuse_adapters(folder)
            self._load_model(folder)
        if not (folder / "optimizer.pt").is_file():
            raise RunError(
                f"checkpoint {folder} was not written by learner.backend torch (optimizer.pt is missing): resume with "
                "the backend that the run was started with, or move the checkpoint away if it is damaged."
            )
        self._optimizer.load_state_dict(torch.load(folder / "optimizer.pt", self.device, weights_only=True))
        reference = folder / "reference.pt"
        # Without reference_every it was the run's first model, as the one that was built is.
        if self._reference is not None and self._reference_every and reference.is_file():
            self._reference.load_state_dict(torch.load(reference, self.device, weights_only=True))
        if self._moving is not None and self._moving.averages:
            refuse_without_average(folder)
            self._moving.load(torch.load(folder / AVERAGE, self.device, weights_only=True))
        elif self._moving is not None:
            self._moving.follow()

    def _load_model(self, folder: Path) -> None:
        saved = load_folder(folder / "hf", torch.float32, f"the checkpoint {folder} is asked for").state_dict()
        mine = self._model.state_dict()
        different = sorted(n for n in saved.keys() | mine.keys() if _shape(saved, n) != _shape(mine, n))
        if different:
            raise RunError(
                f"checkpoint {folder} is of another model: {different[0]} is {_shape(saved, different[0])} there and "
                f"{_shape(mine, different[0])} in model.path. Resume with the model that the run was started with."
            )
        self._model.load_state_dict(saved)

    def _scoring(self, reference: bool) -> AbstractContextManager[Callable[[Packed], Scores]]:
        if not reference:
            return nullcontext(self._policy)
        if self._reference is None:
            raise ValueError("there is no reference model: learner.kl_coef is 0")
        return self._reference.scoring()

    def _trained(self) -> dict[str, Tensor]:
        """The part of the model's state that training changes."""
        state: dict[str, Tensor] = self._model.state_dict()
        if self._adapters is None:
            return state
        return {name: state[name] for name, p in self._model.named_parameters() if p.requires_grad}

    def _build(self, config: Config, load: Load, field: str = "model.path") -> Scorer:
        scorer = scorer_of(config, load(), compute=self._dtype)
        check(scorer, config, field)
        scorer.to(self.device)
        if config.learner.compile:
            compile_layers(scorer, self.device)
        return scorer


def source_of(config: Config, model: PreTrainedModel | None = None) -> Source:
    """`model`, or the one of `config.model`, on the CPU in float32. Raises ConfigError."""
    model = load_model(config.model, torch.float32) if model is None else model.float()
    return Source(model, digest_of(model) if config.learner.lora.r else "")


class SecondModel:
    """The reference model of the KL term: a frozen copy of the whole model."""

    def __init__(self, copy: Scorer, policy: Scorer) -> None:
        self._copy, self._policy = copy.requires_grad_(False), policy

    def scoring(self) -> AbstractContextManager[Scorer]:
        return nullcontext(self._copy)

    def refresh(self) -> None:
        self._copy.load_state_dict(self._policy.state_dict())

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._copy.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._copy.load_state_dict(state)


def on_cpu(state: Any) -> Any:
    """A copy of every tensor in `state`; those that share memory share it in the copy too."""
    copies: dict[Any, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        key: Any = id(tensor)
        if type(tensor) is Tensor and tensor.numel():
            key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return tree_map_only(Tensor, copied, state)


def _shape(state: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None
