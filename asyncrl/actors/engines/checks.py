"""Checks that every engine makes: of a request before it runs, of weights before any parameter is overwritten."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncrl.actors.engines.protocol import PromptTooLong, Sampling, WeightsMismatch
from asyncrl.errors import ConfigError
from asyncrl.trajectory import Int32

if TYPE_CHECKING:
    from asyncrl.weights.device.subscriber import LeasedWeights
    from asyncrl.weights.protocol import Weights

Shapes = Mapping[str, tuple[int, ...]]


class Fit:
    """Checks that weights fit one model. The same weights are checked once, since that reads every byte."""

    def __init__(self, shapes: Shapes, optional: Collection[str]) -> None:
        self._shapes, self._optional = shapes, optional
        self._checked: tuple[Weights, dict[str, torch.Tensor]] | None = None

    def tensors(self, weights: Weights) -> dict[str, torch.Tensor]:
        """The tensors of `weights`. Raises WeightsMismatch if they do not fit."""
        if self._checked is None or self._checked[0] is not weights:
            self._checked = None
            tensors = dict(weights.tensors())
            check_fit(tensors, self._shapes, self._optional, str(weights.id))
            self._checked = weights, tensors
        return self._checked[1]

    def shapes(self, weights: LeasedWeights) -> None:
        """Check shapes only, of weights whose values another process checks. Raises WeightsMismatch."""
        given = {entry.name: entry.shape for entry in weights.layout.entries}
        if problem := _misfit(given, self._shapes, self._optional):
            raise _mismatch(str(weights.id), problem)

    def forget(self) -> None:
        """Drop the reference to the weights."""
        self._checked = None


def check_fit(given: Mapping[str, torch.Tensor], shapes: Shapes, optional: Collection[str], id: str) -> None:
    """Raises WeightsMismatch unless `given` has every tensor of `shapes` (`optional` ones may lack) and no other, each
    finite and of the right shape. `id` names the weights in the error."""
    problem = _misfit({name: tuple(tensor.shape) for name, tensor in given.items()}, shapes, optional)
    for name, tensor in given.items() if not problem else ():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problem = f"{name} holds values that are not finite"
    if problem:
        raise _mismatch(id, problem)


def _misfit(given: Shapes, shapes: Shapes, optional: Collection[str]) -> str:
    if missing := sorted(shapes.keys() - given.keys() - set(optional)):
        return f"{len(missing)} tensors are missing, for instance {missing[0]}"
    if unknown := sorted(given.keys() - shapes.keys() - set(optional)):
        return f"{len(unknown)} tensors are unknown, for instance {unknown[0]}"
    for name, shape in given.items():
        if name in shapes and shape != shapes[name]:
            return f"{name} has shape {list(shape)}, the model's has {list(shapes[name])}"
    return ""


def _mismatch(id: str, problem: str) -> WeightsMismatch:
    return WeightsMismatch(f"weights {id} do not fit the model: {problem}. The old weights stay in use.")


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the safetensors files of a Hugging Face folder. Raises ConfigError."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shapes[name] = tuple(file.get_slice(name).get_shape())
    if not shapes:
        raise ConfigError(f"model.path leads to {folder}, which holds no *.safetensors: convert the model to them.")
    return shapes


def prompt_of(
    request: str, prompt: Sequence[int], sampling: Sampling, *, vocab: int, room: int, running: Collection[str]
) -> Int32:
    """[T] the prompt's ids. `room`: tokens of a row, prompt and output together. `running`: the running requests.

    Raises PromptTooLong; raises ValueError for an out-of-vocabulary id, a zero token budget, or a duplicate request
    name.
    """
    ids = np.asarray(prompt, np.int32)
    # As an unsigned number, a negative id is large.
    if not len(ids) or ids.view(np.uint32).max() >= vocab:
        raise ValueError(f"request {request}: the prompt must hold token ids of 0..{vocab - 1} and not be empty")
    if len(ids) >= room:
        raise PromptTooLong(
            f"request {request}: the prompt has {len(ids)} tokens, a row at most {room} with the output "
            "(env.max_tokens): raise it or shorten the prompt"
        )
    if sampling.max_new_tokens < 1:
        raise ValueError(f"request {request}: max_new_tokens is {sampling.max_new_tokens}, expected at least 1")
    if request in running:
        raise ValueError(f"request {request} is running already: names must be unique")
    return ids
