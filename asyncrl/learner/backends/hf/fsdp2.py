"""FSDP2: the parameters, gradients and optimizer state of one model sharded over all ranks, on any number of them.

Each rank computes different micro-batches (distribution.py). Each layer is gathered when it is used and its gradient
reduced as a sum, so that the gradients of the parts add up. With `model.dtype: bfloat16` layers
compute in it, gradients are reduced in float32 and shards stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_dataclass
from transformers import PreTrainedModel

from asyncrl.checkpoint_names import as_checkpoint
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.backends.distribution import Rounds, add_up
from asyncrl.learner.backends.export import export
from asyncrl.learner.backends.gpu import identity, index_of, refuse_same
from asyncrl.learner.backends.hf.compile import compile_layers
from asyncrl.learner.backends.hf.gathering import gathered
from asyncrl.learner.backends.hf.loading import begun, fill
from asyncrl.learner.backends.hf.lora import Adapters, Weight, check_same_adapters, refuse_adapters, weights
from asyncrl.learner.backends.hf.mesh import mesh, sharers
from asyncrl.learner.backends.hf.scorer import Load, Scorer, check, layers, scorer_of
from asyncrl.learner.backends.hf.torch import TorchBackend, on_cpu
from asyncrl.learner.backends.json_exchange import exchanged
from asyncrl.learner.backends.protocol import Packed, Scores

# Sharded modules look for tensors in their output, whose gradients they wait for.
register_dataclass(Scores)

COLLECTIVES = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
SHARDS = "dcp"
"""Folder of a checkpoint in which every rank writes its shards."""


class Fsdp2Backend(TorchBackend):
    """One rank. Joins the existing process group; without one it trains alone."""

    def __init__(self, config: Config, model: PreTrainedModel | None = None, *, device: str | None = None) -> None:
        """Builds as TorchBackend does; rank 0 alone reads the model (loading.py)."""
        if not dist.is_initialized():
            dist.init_process_group(COLLECTIVES, store=HashStore(), rank=0, world_size=1)
        self.rank, self.dp_size = dist.get_rank(), dist.get_world_size()
        self._rounds = Rounds(self.rank, self.dp_size)
        patience = timedelta(seconds=config.learner.checkpoint_s)
        self._writers = dist.new_group(backend="gloo", timeout=patience)
        self._start = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.launch.start_s))
        self._sharers = sharers(config, self._writers, patience)
        if device is None and torch.cuda.is_available():
            device = f"cuda:{index_of(self.rank)}"
            torch.cuda.set_device(device)
            refuse_same(self._identities())
        super().__init__(config, model, device=device)

    def _identities(self) -> list[str]:
        """The GPU of every rank."""
        return exchanged(identity(), self._writers)

    def logprobs(self, parts: Sequence[Packed], *, reference: bool = False) -> list[Scores]:
        with self._scoring(reference) as scorer:
            return self._rounds.logprobs(scorer, parts)

    def accumulate(self, parts: Sequence[Packed], loss: Callable[[int, Scores], Tensor]) -> None:
        self._rounds.accumulate(self._policy, parts, loss)

    def visit(self, parts: Sequence[Packed], see: Callable[[int, Scores], object]) -> None:
        self._rounds.visit(self._policy, parts, see)

    def add_up(self, mine: Tensor) -> Tensor:
        return add_up(mine, self.device)

    def clip(self, max_norm: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._scorer.parameters(), max_norm)
        return float(full(norm))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return as_checkpoint(self._model, gathered(weights(self._model), self.device, self._dtype))

    def snapshot(self) -> Callable[[Path], None]:
        state = on_cpu(self._state())
        names = [name for name, _ in self._model.named_parameters()]
        # The base under adapters never changes, so it is gathered while training continues.
        copies = [weight.snapshot(on_cpu) for weight in weights(self._model)] if self._adapters else []

        def write(folder: Path) -> None:
            try:
                # In a process group of its own, since training continues in the others.
                state_dict_saver.save(state, checkpoint_id=folder / SHARDS, process_group=self._writers)
            except CheckpointException as error:
                raise _failure(error) from error
            if self._adapters is not None:
                self._write_adapted(self._adapters, copies, folder)
            elif self.rank == 0:
                export(self._model, _read_back(folder / SHARDS, names), folder / "hf")

        return write

    def _write_adapted(self, adapters: Adapters, copies: Sequence[Weight], folder: Path) -> None:
        """Writes merged weights, and adapters. Every rank gathers every tensor, one at a time; rank 0 writes."""
        of_copy = DeviceMesh.from_group(self._sharers, "cpu")

        def for_writers(shards: Tensor) -> Tensor:
            if not isinstance(shards, DTensor):
                return shards.cpu()
            mine = shards.to_local().cpu()
            shape, stride = shards.shape, shards.stride()
            return DTensor.from_local(
                mine, of_copy, shards.placements[-1:], run_check=False, shape=shape, stride=stride
            )

        def whole(shards: Tensor) -> Tensor:
            return full(for_writers(shards))

        merged = ((w.name, full(w.merged(for_writers))) for w in copies)
        if self.rank == 0:
            export(self._model, merged, folder / "hf")
            adapters.write(copies, whole, folder)
            return
        for _ in merged:
            pass
        for w in copies:
            for matrix in (w.a, w.b):
                if matrix is not None:
                    whole(matrix)

    def load(self, folder: Path) -> None:
        if self._adapters is not None:
            self._adapters.check_base(folder)
        else:
            refuse_adapters(folder)
        state, saved = self._state(), _saved(folder)
        self._check_same_model(folder, saved, state["model"])
        optimizer = state["optimizer"]
        # Torch makes the state of every parameter; a critic's own output embedding, say, has no gradient and so none.
        optimizer["state"] = {n: s for n, s in optimizer["state"].items() if f"optimizer.state.{n}.step" in saved}
        if not any(name.startswith("reference.") for name in saved):
            state.pop("reference", None)  # it was the run's first model, as the one that was built is
        try:
            state_dict_loader.load(state, checkpoint_id=folder / SHARDS)
        except CheckpointException as error:
            raise _failure(error) from error
        set_state_dict(
            self._scorer,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=optimizer,
            options=StateDictOptions(strict=False),  # the model's names are checked above
        )
        if "reference" in state and self._reference is not None:
            self._reference.load_state_dict(state["reference"])
        if self._moving is not None and "teacher" not in state:  # the shards of an average were read in place
            self._moving.follow()

    def _build(self, config: Config, load: Load, field: str = "model.path") -> Scorer:
        scorer, held = begun(load, partial(scorer_of, config), lambda made: check(made, config, field), self._start)
        offload, half = config.learner.cpu_offload, self._dtype == torch.bfloat16
        options: dict[str, Any] = {
            "mesh": mesh(config, self.device.type, self.dp_size),
            "mp_policy": MixedPrecisionPolicy(self._dtype, torch.float32) if half else MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy(self.device.type == "cuda") if offload else OffloadPolicy(),
        }
        for layer in layers(scorer.model):
            fully_shard(layer, **options)
        fully_shard(scorer, **options)
        for module in scorer.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # only NCCL has a divide factor of its own
        fill(scorer, held, over=self.device, into=torch.device("cpu") if offload else self.device)
        if config.learner.compile:
            compile_layers(scorer, self.device)
        return scorer

    def _state(self) -> dict[str, Any]:
        """The contents of a checkpoint as shards, which `load` fills."""
        stepped = bool(self._optimizer.state)
        model, optimizer = get_state_dict(self._scorer, self._optimizer)
        if not stepped:  # torch made the state by a step with gradients of 0, which is none of the run's
            for of_parameter in self._optimizer.state.values():
                of_parameter["step"].zero_()
        trained = {f"model.{name}" for name in self._trained()}
        model = {name: tensor for name, tensor in model.items() if name in trained}
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if self._reference is not None and self._reference_every:
            state["reference"] = self._reference.state_dict()
        if self._moving is not None and self._moving.averages:
            state["teacher"] = self._moving.state_dict()
        return state

    def _check_same_model(self, folder: Path, saved: dict[str, STORAGE_TYPES], model: dict[str, Any]) -> None:
        """Raises RunError unless the checkpoint is of this model."""
        theirs = {n: tuple(m.size) for n, m in saved.items() if isinstance(m, TensorStorageMetadata)}
        mine = {f"model.{name}": tuple(tensor.shape) for name, tensor in model.items()}
        theirs = {name: shape for name, shape in theirs.items() if name.startswith("model.")}
        if self._adapters is not None:
            check_same_adapters(folder, theirs, mine)
        different = sorted(n for n in theirs.keys() | mine.keys() if theirs.get(n) != mine.get(n))
        if different:
            name = different[0]
            raise RunError(
                f"checkpoint {folder} is of another model: {name} is {theirs.get(name)} there and {mine.get(name)} in "
                "model.path. Resume with the model that the run was started with."
            )


def _saved(folder: Path) -> dict[str, STORAGE_TYPES]:
    """What a checkpoint's shards hold, by name. Raises RunError for one that this backend did not write."""
    if not (folder / SHARDS / ".metadata").is_file():
        raise RunError(
            f"checkpoint {folder} was not written by learner.backend fsdp2 ({SHARDS}/.metadata is missing): resume "
            "with the backend that the run was started with, or move the checkpoint away if it is damaged."
        )
    return FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata


def full(tensor: Tensor) -> Tensor:
    """The full tensor of all ranks' shards; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _read_back(shards: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The model's full parameters from the shards of all ranks, one at a time."""
    saved = FileSystemReader(shards).read_metadata().state_dict_metadata
    for name in names:
        about = saved[f"model.model.{name}"]
        assert isinstance(about, TensorStorageMetadata)
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        state_dict_loader.load({"model": {f"model.{name}": tensor}}, checkpoint_id=shards, no_dist=True)
        yield name, tensor


def _failure(error: CheckpointException) -> Exception:
    """The disk's error, whichever rank had it; anything else, such as a dead rank, ends this rank too."""
    for failure, _ in error.failures.values():
        if isinstance(failure, OSError):
            return failure
    rank, (failure, _) = next(iter(error.failures.items()))
    return RuntimeError(f"a checkpoint failed at rank {rank}: {failure}")
