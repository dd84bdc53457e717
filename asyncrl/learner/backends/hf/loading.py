"""How a model comes to several ranks: rank 0 alone reads and checks it, and no other ever holds the whole of it.

    rank 0    reads ─> adapters ─> check ─┬─ what it is, or why it was refused ─> weights: broadcast one at a time
    others    ────────────────────────────┴─> the same modules without data ─> shards of each weight as it arrives

So each rank's host memory is its shards and one tensor; rank 0's has the model until it is given out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends import json_exchange
from asyncrl.learner.backends.hf.scorer import Load, Scorer, Source

Make = Callable[[Source], Scorer]
"""A scorer of a model; raises ConfigError."""
Held = dict[str, Tensor]
"""The tensors of a scorer by name, tied ones once; of none on every rank but 0."""


def begun(load: Load, make: Make, check: Callable[[Scorer], None], group: dist.ProcessGroup) -> tuple[Scorer, Held]:
    """The scorer without data, the same on all ranks of `group`, and at rank 0 the tensors that belong in it. Rank 0
    calls `load` and `check`, whose ConfigError all ranks raise; the others wait as long as `group` does."""
    if dist.get_rank(group):
        return _as_told(json_exchange.told(group), make)
    try:
        source = load()
        scorer = make(source)
        check(scorer)
    except Exception as error:
        refused = "refused" if isinstance(error, ConfigError) else "failed"
        json_exchange.tell({refused: str(error) or type(error).__name__}, group)
        raise
    ties = _ties(scorer)
    json_exchange.tell(
        {
            "config": json.loads(source.model.config.to_json_string(use_diff=False)),
            "digest": source.digest,
            "tensors": _described(scorer),
            "ties": ties,
        },
        group,
    )
    return scorer, emptied(scorer, ties)


def emptied(scorer: Scorer, ties: Mapping[str, str]) -> Held:
    """Takes the data out of a scorer: its tensors are on `meta` afterwards, and tied as in `ties`."""
    held: Held = {}
    hollow: dict[str, Tensor] = {}
    for name, tensor in list(_tensors(scorer)):
        first = ties.get(name, name)
        if first not in hollow:
            held[first] = tensor.detach()
            empty = torch.empty_like(tensor, device="meta")
            hollow[first] = nn.Parameter(empty, tensor.requires_grad) if _trains(tensor) else empty
        _put(scorer, name, hollow[first])
    return held


def fill(scorer: Scorer, held: Held, *, over: torch.device, into: torch.device) -> None:
    """Gives every tensor of a sharded scorer its data, from rank 0, which gives up its own. `over`: the device on
    which tensors are sent; `into`: where shards are kept."""
    filled: dict[int, Tensor] = {}
    for name, empty in list(_tensors(scorer)):
        if id(empty) not in filled:
            mine = held.pop(name, None)
            whole = torch.empty(empty.shape, dtype=empty.dtype, device=over) if mine is None else mine.to(over)
            dist.broadcast(whole, 0)
            filled[id(empty)] = _kept(empty, whole, into)
        _put(scorer, name, filled[id(empty)])


def _kept(empty: Tensor, whole: Tensor, into: torch.device) -> Tensor:
    """What this rank keeps of a tensor: its shards of a parameter, all of a buffer."""
    if not isinstance(empty, DTensor):
        return nn.Parameter(whole, empty.requires_grad) if _trains(empty) else whole
    kept: Any = torch.empty_like(empty, device=into)
    # Every rank has the tensor, so nothing is sent.
    shards = distribute_tensor(whole, empty.device_mesh, empty.placements, src_data_rank=None)
    kept.to_local().copy_(shards.to_local())
    return nn.Parameter(kept, empty.requires_grad)


def _as_told(told: Mapping[str, Any], make: Make) -> tuple[Scorer, Held]:
    """The scorer of rank 0, without data. A config ties tensors which rank 0 does not tie if it has read different
    values for them."""
    if reason := told.get("refused"):
        raise ConfigError(reason)
    if reason := told.get("failed"):
        raise RuntimeError(f"rank 0 of the learner could not load the model: {reason}")
    given = CONFIG_MAPPING[told["config"]["model_type"]].from_dict(told["config"])
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(given)
    scorer = make(Source(model, told["digest"]))
    emptied(scorer, told["ties"])
    mine = _described(scorer)
    if mine != told["tensors"]:
        different = next(n for n in [*mine, *told["tensors"]] if mine.get(n) != told["tensors"].get(n))
        raise RunError(
            f"the ranks of the learner have made different models: {different} is {told['tensors'].get(different)} at "
            f"rank 0 and {mine.get(different)} at rank {dist.get_rank()}. Install the same version of transformers "
            "on every node."
        )
    return scorer, {}


def _described(scorer: Scorer) -> dict[str, Any]:
    return {name: [str(x.dtype), *x.shape] for name, x in _tensors(scorer)}


def _ties(scorer: Scorer) -> dict[str, str]:
    """By each name of a tensor the first one."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(x), name) for name, x in _tensors(scorer)}


def _tensors(scorer: Scorer) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name; tied ones under each of their names."""
    yield from scorer.named_parameters(remove_duplicate=False)
    yield from scorer.named_buffers(remove_duplicate=False)


def _put(scorer: Scorer, name: str, tensor: Tensor) -> None:
    module, _, last = name.rpartition(".")
    setattr(scorer.get_submodule(module), last, tensor)


def _trains(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)
