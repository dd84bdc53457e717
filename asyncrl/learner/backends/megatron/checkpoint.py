"""A checkpoint of the Megatron backend: full tensors with Hugging Face names, each in the file of one rank.

    hf/        config, model-00001.safetensors ... of each rank, index: float32, what transformers loads
    megatron/  rank-00001.safetensors ...: <kind>/<name>; index.json. Kinds: exp_avg, exp_avg_sq,
               reference, teacher (an average of the policy)

Nothing in it depends on the number of ranks, or on how they split the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from asyncrl.errors import RunError
from asyncrl.learner.backends.json_exchange import exchanged

_STATE = "megatron"
_HF_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Form:
    """A model without its weights."""

    config: PretrainedConfig
    generation: GenerationConfig | None
    shapes: dict[str, tuple[int, ...]]

    @staticmethod
    def of(model: PreTrainedModel) -> Form:
        model.config.architectures = [type(model).__name__]
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return Form(model.config, model.generation_config, shapes)


@dataclass(frozen=True, slots=True)
class OwnTensors:
    """The tensors that one rank writes, of those that all ranks iterate over."""

    tensors: dict[str, Tensor]
    owners: dict[str, int]
    """The rank that writes each tensor"""
    bytes: int
    """Size of all tensors"""


def own_tensors(named: Iterable[tuple[str, Tensor]], rank: int, ranks: int) -> OwnTensors:
    """Copies every `ranks`-th tensor to CPU memory."""
    tensors, owners, total = dict[str, Tensor](), dict[str, int](), 0
    for i, (name, tensor) in enumerate(named):
        owners[name] = i % ranks
        total += tensor.nbytes
        if i % ranks == rank:
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    return OwnTensors(tensors, owners, total)


def write(
    folder: Path, form: Form, weights: OwnTensors, state: OwnTensors, *, step: int, rank: int, group: dist.ProcessGroup
) -> None:
    """Returns when all ranks have written. Raises OSError when one of them could not."""
    problem = None
    try:
        for place in (folder / "hf", folder / _STATE):
            place.mkdir(parents=True, exist_ok=True)
        save_file(weights.tensors, folder / "hf" / _hf_file(rank), metadata={"format": "pt"})
        save_file(state.tensors, folder / _STATE / _state_file(rank))
        if rank == 0:
            _index(folder, form, weights, state, step)
    except (OSError, SafetensorError) as error:
        problem = f"rank {rank}: {error}"
    for message in exchanged(problem, group):
        if message is not None:
            raise OSError(message)


class Saved:
    """A checkpoint's tensors, read one at a time."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self.folder, self._files, self._open = folder, files, dict[Path, Any]()
        self._hf: dict[str, str] = json.loads((folder / "hf" / _HF_INDEX).read_text())["weight_map"]
        index = json.loads((folder / _STATE / "index.json").read_text())
        self._state: dict[str, str] = index["files"]
        self.step: int = index["step"]

    def weight(self, name: str) -> Tensor:
        return self._of(self.folder / "hf" / self._hf[name]).get_tensor(name)  # type: ignore[no-any-return]

    def state(self, name: str) -> Tensor:
        return self._of(self.folder / _STATE / self._state[name]).get_tensor(name)  # type: ignore[no-any-return]

    def has(self, kind: str) -> bool:
        """Whether it holds state of this kind."""
        return any(name.startswith(f"{kind}/") for name in self._state)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        files = {name: self._of(self.folder / "hf" / file) for name, file in self._hf.items()}
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}

    def _of(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = self._files.enter_context(safe_open(path, framework="pt"))
        return self._open[path]


@contextmanager
def opened(folder: Path, form: Form) -> Iterator[Saved]:
    """Raises RunError for a checkpoint of another backend or another model, and for a damaged one."""
    if not (folder / _STATE / "index.json").is_file():
        raise RunError(
            f"checkpoint {folder} was not written by learner.backend megatron ({_STATE}/index.json is missing): "
            "resume with the backend that the run was started with, or move the checkpoint away if it is damaged."
        )
    with ExitStack() as files:
        try:
            saved = Saved(folder, files)
            theirs = saved.shapes()
            different = sorted(n for n in theirs.keys() | form.shapes.keys() if theirs.get(n) != form.shapes.get(n))
            if different:
                name = different[0]
                raise RunError(
                    f"checkpoint {folder} is of another model: {name} is {theirs.get(name)} there and "
                    f"{form.shapes.get(name)} in model.path. Resume with the model that the run was started with."
                )
            yield saved
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise RunError(
                f"checkpoint {folder} is damaged ({error}): move it away, and --resume takes the one before it."
            ) from error


def _index(folder: Path, form: Form, weights: OwnTensors, state: OwnTensors, step: int) -> None:
    form.config.save_pretrained(folder / "hf")
    if form.generation is not None:
        form.generation.save_pretrained(folder / "hf")
    hf = {"metadata": {"total_size": weights.bytes}, "weight_map": {n: _hf_file(r) for n, r in weights.owners.items()}}
    (folder / "hf" / _HF_INDEX).write_text(json.dumps(hf, indent=1))
    index = {"step": step, "files": {n: _state_file(r) for n, r in state.owners.items()}}
    (folder / _STATE / "index.json").write_text(json.dumps(index, indent=1))


def _hf_file(rank: int) -> str:
    return f"model-{rank + 1:05d}.safetensors"


def _state_file(rank: int) -> str:
    return f"rank-{rank + 1:05d}.safetensors"
