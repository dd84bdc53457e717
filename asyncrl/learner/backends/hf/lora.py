"""LoRA (2106.09685), through peft: small matrices are trained, and those of the layers are frozen.

    W x  +  scaling * B (A x)       W [out, in] frozen;  A [r, in] drawn, B [out, r] zero at the start

W + scaling * B A is computed at each publication and export; W itself never changes, so nothing drifts. While B is zero
the model equals its base, which is the reference of the KL term (reference.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError

FOLDER = "adapter"
"""Folder of a checkpoint that `peft.PeftModel.from_pretrained` loads over the base."""
_WEIGHTS, _BASE = "adapter_model.safetensors", "base.json"
_NAME = "default"
"""peft's name of a model's only adapter."""
Place = Callable[[Tensor], Tensor]
"""Moves a tensor, or its shards, to another device."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One of the model's weights, with its adapter if it has one."""

    name: str
    """Hugging Face's name"""
    base: Tensor
    a: Tensor | None = None
    b: Tensor | None = None
    scaling: float = 0.0

    def merged(self, place: Place) -> Tensor:
        """The weight with its adapter added, a new tensor if it has one; shards stay shards."""
        base = place(self.base.detach())
        if self.a is None or self.b is None:
            return base
        a, b = place(self.a.detach()), place(self.b.detach())
        if isinstance(a, DTensor):  # rows of W and of B lie on the same rank; each needs all of A, which is small
            a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)
        return base + self.scaling * (b @ a)

    def snapshot(self, copy: Callable[[Any], Any]) -> Weight:
        """The weight with a copy of its adapter, if it has one."""
        return replace(self, a=copy(self.a), b=copy(self.b)) if self.a is not None else self


def weights(model: nn.Module) -> list[Weight]:
    """All of the model's tensors, not copies; tied ones once."""
    state = model.state_dict(keep_vars=True)
    all_weights, seen = [], set[int]()
    for name, tensor in state.items():
        if id(tensor) in seen or ".lora_" in name:
            continue
        seen.add(id(tensor))
        module, under, _ = name.partition(".base_layer.")
        if under and name.endswith(".weight"):
            a, b = (state[f"{module}.lora_{x}.{_NAME}.weight"] for x in "AB")
            scaling: Any = model.get_submodule(module).scaling
            all_weights.append(Weight(f"{module}.weight", tensor, a, b, scaling[_NAME]))
        else:
            all_weights.append(Weight(name.replace(".base_layer.", "."), tensor))
    return all_weights


class Adapters:
    """The adapters of one model: their injection, and their files."""

    def __init__(self, model: PreTrainedModel, config: Config, base: str) -> None:
        """Freezes everything else in `model`, which must be unsharded float32; `base` is its digest. Raises ConfigError
        naming the field."""
        if find_spec("peft") is None:
            raise ConfigError(
                f"learner.lora.r is {config.learner.lora.r}, and peft is not installed: pip install 'asyncrl[lora]', "
                "or set it to 0."
            )
        import peft  # a second of imports
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._base = base
        given = config.learner.lora
        self._described = peft.LoraConfig(
            r=given.r,
            lora_alpha=given.lora_alpha,
            use_rslora=given.use_rslora,
            target_modules=list(given.target_modules) or "all-linear",
            exclude_modules=list(given.exclude_modules) or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=config.model.path,
        )
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.learner.seed)  # the same on every rank, whatever was drawn before
                peft.inject_adapter_in_model(self._described, model, _NAME)
        except ValueError as error:
            raise ConfigError(
                f"learner.lora.target_modules is {list(given.target_modules)}, which does not fit a "
                f"{type(model).__name__}: {error}"
            ) from error
        if any(isinstance(x, BaseTunerLayer) for x in (model.get_input_embeddings(), model.get_output_embeddings())):
            raise ConfigError(
                f"learner.lora.target_modules is {list(given.target_modules)}, which includes the embeddings or the "
                "head: those stay frozen. Name matrices of the layers, such as q_proj, or leave it empty for all."
            )

    def write(self, copies: Sequence[Weight], place: Place, folder: Path) -> None:
        """Writes `adapter/` of a checkpoint's folder."""
        self._described.save_pretrained(folder / FOLDER)
        matrices = {
            key: place(x.detach()).to("cpu").contiguous()
            for w in copies
            if w.a is not None and w.b is not None
            for key, x in zip(_keys(w.name), (w.a, w.b), strict=True)
        }
        save_file(matrices, folder / FOLDER / _WEIGHTS, metadata={"format": "pt"})
        (folder / FOLDER / _BASE).write_text(json.dumps({"base": self._base}))

    def check_base(self, folder: Path) -> None:
        """Raises RunError unless the checkpoint has adapters of the same base."""
        if not (folder / FOLDER / _BASE).is_file():
            raise RunError(
                f"checkpoint {folder} has no adapters: it was not written with learner.lora. Resume with "
                "learner.lora.r 0, as the run was started."
            )
        if json.loads((folder / FOLDER / _BASE).read_text())["base"] != self._base:
            raise RunError(
                f"checkpoint {folder} holds adapters of another model than the one in model.path: resume with the "
                "model that the run was started with."
            )

    def read(self, folder: Path, into: Sequence[Weight]) -> None:
        """The inverse of `write`. Raises RunError for adapters of other matrices or another rank, or another base."""
        self.check_base(folder)
        saved = load_file(folder / FOLDER / _WEIGHTS)
        mine = {
            key: x
            for w in into
            if w.a is not None and w.b is not None
            for key, x in zip(_keys(w.name), (w.a, w.b), strict=True)
        }
        check_same_adapters(
            folder, {n: tuple(x.shape) for n, x in saved.items()}, {n: tuple(x.shape) for n, x in mine.items()}
        )
        with torch.no_grad():
            for name, x in mine.items():
                x.copy_(saved[name])


def refuse_adapters(folder: Path) -> None:
    """Raises RunError where a checkpoint holds adapters and the learner trains all weights."""
    if (folder / FOLDER).is_dir():
        rank = json.loads((folder / FOLDER / "adapter_config.json").read_text())["r"]
        raise RunError(
            f"checkpoint {folder} was written with learner.lora.r {rank}: resume with it, as the run was started. To "
            f"train all weights from there, begin a run with model.path {folder / 'hf'}."
        )


def check_same_adapters(folder: Path, theirs: Mapping[str, Sequence[int]], mine: Mapping[str, Sequence[int]]) -> None:
    """Raises RunError unless names and shapes of adapters are the same."""
    different = sorted(n for n in theirs.keys() | mine.keys() if theirs.get(n) != mine.get(n))
    if different:
        name = different[0]
        raise RunError(
            f"checkpoint {folder} has other adapters: {name} is {theirs.get(name)} there and {mine.get(name)} here. "
            "Resume with the learner.lora that the run was started with."
        )


def _keys(name: str) -> tuple[str, str]:
    """Names of the two matrices as peft writes them."""
    module = name.removesuffix(".weight")
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def digest_of(model: nn.Module) -> str:
    """Of names and values of the parameters of an unsharded model on the CPU."""
    digest = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
