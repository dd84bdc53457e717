"""The cases of the conformance tests, and what is played of each in its processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.backends.protocol import Backend, Packed, Scores
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.step.train_step import train_step
from tests.learner.backends.hf.test_torch import pack_rows, rows
from tests.learner.ranks import DEADLINE_S
from tests.learner.step.test_train_step import a_batch
from tests.learner.tiny import VOCABULARY, tiny_config, tiny_model

LR = 1e-3
LORA = (("lora", {"r": 3, "lora_alpha": 6.0}),)


def sharded_gradients(backend: Any) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor() for n, p in backend._model.named_parameters() if p.requires_grad}


def plain_gradients(backend: Any) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in backend._model.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class Case:
    """One backend at one number of ranks."""

    build: Callable[[Config, PreTrainedModel], Backend]
    gradients: Callable[[Any], dict[str, Tensor]]
    """Of the accumulated gradient, whole, by Hugging Face name; asked on every rank."""
    ranks: int = 1
    family: str = "qwen3"
    learner: tuple[tuple[str, Any], ...] = ()
    layers: int = 2

    def model(self, seed: int = 0) -> PreTrainedModel:
        return tiny_model(self.family, seed, self.layers)

    @property
    def different(self) -> int:
        """Ranks that compute different micro-batches."""
        options = dict(self.learner).get("backend_options", {})
        return int(self.ranks / options.get("tensor_parallel", 1) / options.get("pipeline_parallel", 1))

    @property
    def pipelined(self) -> bool:
        return dict(self.learner).get("backend_options", {}).get("pipeline_parallel", 1) > 1

    @property
    def lora(self) -> dict[str, Any] | None:
        return dict(self.learner).get("lora")

    def another(self, config: Config) -> Backend:
        """Of other values than the first, where those are what it loads."""
        drawn = config.model_copy(update={"learner": config.learner.model_copy(update={"seed": 9})})
        return self.build(drawn, self.model(seed=0 if self.lora else 9))


def streamed_gradients(backend: Any) -> dict[str, Tensor]:
    return {n: g.clone() for n, g in backend.gradients()}


def megatron(config: Config, model: PreTrainedModel) -> Backend:
    from asyncrl.learner.backends.megatron.backend import MegatronBackend  # seconds of imports

    return MegatronBackend(config, model, device="cpu")


def on_megatron(ranks: int, family: str, *, checkpointing: bool = False, layers: int = 2, **options: Any) -> Case:
    learner = {"backend": "megatron", "backend_options": options, "activation_checkpointing": checkpointing}
    return Case(megatron, streamed_gradients, ranks, family, tuple(learner.items()), layers)


def on_cpu(kind: Callable[..., Backend]) -> Callable[[Config, PreTrainedModel], Backend]:
    return partial(kind, device="cpu")


def on_nodes(nodes: int, each: int, *learner: tuple[str, Any]) -> Case:
    """A copy of the model on each node, sharded over its ranks (HSDP)."""
    sharded = {"backend": "fsdp2", "ranks": nodes * each, "ranks_per_node": each, "shard": "node"}
    return Case(on_cpu(Fsdp2Backend), sharded_gradients, nodes * each, learner=(*sharded.items(), *learner))


CASES = {
    "torch": Case(on_cpu(TorchBackend), plain_gradients),
    "fsdp2-1": Case(on_cpu(Fsdp2Backend), sharded_gradients),
    "fsdp2-2": Case(on_cpu(Fsdp2Backend), sharded_gradients, ranks=2),
    "fsdp2-2-untied": Case(on_cpu(Fsdp2Backend), sharded_gradients, ranks=2, family="llama"),
    "fsdp2-3-untied": Case(on_cpu(Fsdp2Backend), sharded_gradients, ranks=3, family="llama"),
    "fsdp2-2-checkpointing": Case(
        on_cpu(Fsdp2Backend), sharded_gradients, ranks=2, learner=(("activation_checkpointing", True),)
    ),
    "torch-lora": Case(on_cpu(TorchBackend), plain_gradients, learner=LORA),
    "fsdp2-2-lora": Case(on_cpu(Fsdp2Backend), sharded_gradients, ranks=2, family="qwen2", learner=LORA),
    "megatron-tp2": on_megatron(2, "qwen3", tensor_parallel=2),
    "megatron-pp2": on_megatron(2, "qwen3", pipeline_parallel=2),
    "megatron-dp2-sharded-optimizer": on_megatron(2, "qwen2", distributed_optimizer=True),
    "megatron-1": on_megatron(1, "llama"),
    "megatron-dp2": on_megatron(2, "qwen3"),
    "megatron-tp2-untied": on_megatron(2, "qwen2", tensor_parallel=2),
    "megatron-tp2-sequence": on_megatron(2, "llama", tensor_parallel=2, sequence_parallel=True),
    "megatron-tp2-dp2-all": on_megatron(
        4,
        "qwen3",
        checkpointing=True,
        tensor_parallel=2,
        sequence_parallel=True,
        distributed_optimizer=True,
    ),
    "megatron-pp3-untied": on_megatron(3, "qwen2", pipeline_parallel=3, layers=4),
    "megatron-pp2-dp2-sharded-optimizer": on_megatron(4, "qwen3", pipeline_parallel=2, distributed_optimizer=True),
    "megatron-pp2-tp2-all": on_megatron(
        4,
        "qwen3",
        checkpointing=True,
        tensor_parallel=2,
        pipeline_parallel=2,
        sequence_parallel=True,
        distributed_optimizer=True,
    ),
}
CASES |= {
    "fsdp2-2-nodes-of-2": on_nodes(2, 2),
    "fsdp2-2-nodes-of-2-lora": on_nodes(2, 2, *LORA),
}
QUICK = ("megatron-tp2", "megatron-pp2", "megatron-dp2-sharded-optimizer")
SLOW = (
    "fsdp2-3-untied",
    "fsdp2-2-nodes-of-2-lora",
    *(name for name in CASES if name.startswith("megatron") and name not in QUICK),
)
SYSTEM = (
    "fsdp2-2-untied",
    "fsdp2-2-checkpointing",
    "fsdp2-2-nodes-of-2",
    *(name for name in QUICK if name != "megatron-tp2"),
)


def kept_sets(seed: int) -> list[dict[int, list[int]]]:
    """Kept ids by token of each row: of no token of every second row, and of four tokens in five of the others."""
    g = torch.Generator().manual_seed(1000 + seed)
    sets: list[dict[int, list[int]]] = []
    for i, (ids, mask) in enumerate(rows(seed)):
        with_set = [t for t in mask.nonzero()[:, 0].tolist() if i % 2 == 0 and t % 5]
        drawn = [torch.randperm(VOCABULARY, generator=g)[: t % 7].tolist() for t in with_set]
        sets.append({t: sorted({int(ids[t]), *others}) for t, others in zip(with_set, drawn, strict=True)})
    return sets


def parts(seed: int) -> list[Packed]:
    """Three micro-batches of unlike cost: no two ranks can share them evenly. One of them has no kept ids."""
    made, sets = rows(seed), kept_sets(seed)
    return [_pack(made[cut], sets[cut]) for cut in (slice(3), slice(3, 4), slice(4, None))]


def _pack(made: list[tuple[Tensor, Tensor]], sets: list[dict[int, list[int]]]) -> Packed:
    each = [
        of_row.get(t, []) for (_, mask), of_row in zip(made, sets, strict=True) for t in mask.nonzero()[:, 0].tolist()
    ]
    widest = max(map(len, each), default=0)
    kept = torch.tensor([ids + [-1] * (widest - len(ids)) for ids in each], dtype=torch.int32) if widest else None
    return replace(pack_rows(made), kept=kept)


def loss(_: int, scores: Scores) -> Tensor:
    return scores.logprobs.sum() * 0.3 + 0.1 * scores.entropy.sum()


def first(values: Any) -> Any:
    """What rank 0 tells; the others would say the same."""
    return values if not dist.is_initialized() or dist.get_rank() == 0 else None


def played(case: Case, folder: Path) -> dict[str, Any]:
    config = tiny_config(**dict(case.learner))
    found: dict[str, Any] = {}
    backend = case.build(config, case.model())
    found["scores"] = [(s.logprobs, s.entropy) for s in backend.logprobs(parts(0))]
    found["visited"] = {}
    backend.visit(parts(0), lambda i, s: found["visited"].setdefault(i, (s.logprobs, s.entropy)))
    asked: list[int] = []
    losses: list[float] = []

    def counted(i: int, scores: Scores) -> Tensor:
        asked.append(i)
        value = loss(i, scores)
        losses.append(float(value))
        return value

    backend.accumulate(parts(0), counted)
    found["asked"] = sorted(asked)
    found["loss"] = float(backend.add_up(torch.tensor(sum(losses), dtype=torch.float64)))
    found["gradients"] = case.gradients(backend)
    backend.discard()

    def update(seed: int) -> float:
        backend.accumulate(parts(seed), loss)
        norm = backend.clip(1.0)
        backend.apply(LR)
        return norm

    found["norms"] = [update(seed) for seed in range(2)]
    if first(True):
        folder.mkdir(parents=True)
    if dist.is_initialized():
        dist.barrier()
    write = backend.snapshot()
    with ThreadPoolExecutor(1) as beside:
        # Written while training goes on: what is loaded below is of before.
        written = beside.submit(write, folder / "saved")
        backend.mark()
        found["norms"].append(update(2))
        written.result(DEADLINE_S)
    found["weights"] = {n: t.clone() for n, t in backend.weights()}
    update(3)
    backend.rollback()
    found["norms_again"] = update(2)
    found["rolled_back"] = {n: t.clone() for n, t in backend.weights()}
    if dist.is_initialized():
        dist.barrier()
    loaded = case.another(config)
    loaded.load(folder / "saved")
    backend = loaded
    update(2)
    found["resumed"] = {n: t.clone() for n, t in backend.weights()}
    other = case.build(config, tiny_model("qwen2" if case.family != "qwen2" else "llama", layers=case.layers))
    try:
        other.load(folder / "saved")
    except RunError as error:
        found["refused"] = str(error)
    found["step"] = stepped(case, 64)
    alike = ("scores", "asked", "loss", "visited", "norms", "step")
    return found if first(True) else {name: found[name] for name in alike}


def stepped(case: Case, limit: int) -> tuple[dict[str, Tensor], list[float]]:
    """Two whole training steps of two updates each."""
    config = tiny_config(minibatches=2, tokens_per_micro_batch=limit, **dict(case.learner))
    backend, objective = case.build(config, case.model()), Objective(config.learner)
    results = [train_step(backend, objective, a_batch(v), config.learner, version=v) for v in range(2)]
    numbers = [x for r in results for x in (r.record.loss, *r.record.grad_norms)]
    return {n: t.clone() for n, t in backend.weights()}, numbers


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    worst = {n: float((a[n] - b[n].detach()).abs().max()) for n in a}
    assert {n: d for n, d in worst.items() if not d <= tolerance} == {}
