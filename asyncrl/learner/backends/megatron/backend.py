"""Megatron-core: matrices split over `tensor_parallel` ranks, layers over `pipeline_parallel` groups of those, and as
many such models as learner.ranks has room for (groups.py).

Weights, moments and gradients are gathered one at a time, with Hugging Face names and shapes. A checkpoint holds them
so, spread over files of all ranks, and is loaded with any other number of ranks and any other options. With
`model.dtype: bfloat16` layers compute in it; gradients are summed in float32, and the optimizer's weights are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.learner.backends.distribution import Rounds, add_up
from asyncrl.learner.backends.hf.fsdp2 import COLLECTIVES
from asyncrl.learner.backends.hf.teacher import comparison_of
from asyncrl.learner.backends.megatron import checkpoint
from asyncrl.learner.backends.megatron.building import Builder
from asyncrl.learner.backends.megatron.groups import Options, join, options_of
from asyncrl.learner.backends.megatron.model import Decoder, layout_of
from asyncrl.learner.backends.megatron.pieces import Pieces
from asyncrl.learner.backends.megatron.pipeline import Pipeline
from asyncrl.learner.backends.megatron.scorer import Distillation, Scorer
from asyncrl.learner.backends.megatron.shards import MOMENTS, Shards
from asyncrl.learner.backends.megatron.teacher import STATE as TEACHER
from asyncrl.learner.backends.megatron.teacher import frozen_teacher, moving_teacher
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.model import load_model


class MegatronBackend:
    """One rank. Joins the existing process group; without one it trains alone."""

    def __init__(self, config: Config, model: PreTrainedModel | None = None, *, device: str | None = None) -> None:
        """Builds from `config.model`, or from `model`, which it consumes; every rank reads all of it and keeps its
        pieces. Raises ConfigError for options that do not fit ranks or model."""
        options = options_of(config)
        if not dist.is_initialized():
            dist.init_process_group(COLLECTIVES, store=HashStore(), rank=0, world_size=1)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        waits = timedelta(seconds=config.learner.collective_s), timedelta(seconds=config.learner.checkpoint_s)
        self._groups = groups = join(options, *waits)
        if self.device.type == "cuda":
            torch.cuda.set_device(groups.rank % torch.cuda.device_count())
            model_parallel_cuda_manual_seed(config.learner.seed)
        else:
            from asyncrl.learner.backends.megatron.cpu import stand_in  # for CPUs only

            stand_in()
        self._config = config
        self._builder = builder = Builder(config, options, groups, self.device)
        rounds = Rounds(groups.data.rank(), groups.data.size(), groups.data)
        self._passes = rounds if options.pipeline_parallel == 1 else Pipeline(rounds, groups, builder.on_device)
        # A pipeline needs as many micro-batches as it has stages to be busy.
        self.dp_size = groups.data.size() * options.pipeline_parallel

        source = model or load_model(config.model, torch.float32)
        self._form = checkpoint.Form.of(source)
        layout = layout_of(source.config, options)
        decoder = builder.decoder(source, layout, config.learner.activation_checkpointing)
        self._pieces = Pieces(decoder, layout, groups)
        buckets = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=options.distributed_optimizer,
        )
        self._ddp = DistributedDataParallel(decoder.config, buckets, decoder)
        self._scorer = builder.scorer(decoder, self._ddp, layout)
        builder.check(source, lambda part: self._score(self._scorer, part), "model.path", config.model.path)
        self._reference: Scorer | None = None
        if config.learner.kl_coef > 0:
            # The reference begins as the run's first model, whatever `model` holds.
            self._reference = builder.frozen(load_model(config.model, torch.float32), layout)
        self._moving = moving_teacher(config, builder, self._scorer, self._pieces)
        self.teacher_digest = self._learn_from_teacher()
        with self._builder.on_device():
            self._optimizer = get_megatron_optimizer(_adamw(config, options), [self._ddp])
        (self._inner,) = self._optimizer.chained_optimizers
        self._inner.optimizer = fused_adamw(self._inner.optimizer)
        self._shards = Shards(decoder, self._inner, groups.data)
        self._write_weights(source.state_dict().__getitem__)
        self._gradients_summed = False
        self._restore: Callable[[], None] | None = None

    def logprobs(self, parts: Sequence[Packed], *, reference: bool = False) -> list[Scores]:
        scorer = self._reference if reference else self._scorer
        if scorer is None:
            raise ValueError("there is no reference model: learner.kl_coef is 0")
        return self._passes.logprobs(scorer, parts)

    def refresh_reference(self) -> None:
        if self._reference is None:
            raise ValueError("there is no reference model: learner.kl_coef is 0")
        self._reference.decoder.load_state_dict(self._scorer.decoder.state_dict())

    def move_teacher(self) -> None:
        if self._moving is None:
            raise ValueError("there is no teacher that moves: learner.teacher.path is another than policy")
        self._moving.move(self._main())

    def accumulate(self, parts: Sequence[Packed], loss: Callable[[int, Scores], Tensor]) -> None:
        self._passes.accumulate(self._scorer, parts, loss)

    def visit(self, parts: Sequence[Packed], see: Callable[[int, Scores], object]) -> None:
        self._passes.visit(self._scorer, parts, see)

    def add_up(self, mine: Tensor) -> Tensor:
        return add_up(mine, self.device, counts=self._groups.tells)

    def clip(self, max_norm: float) -> float:
        self._sum_gradients()
        with self._builder.on_device():
            self._optimizer.prepare_grads()
            return float(self._inner.clip_grad_norm(max_norm))

    def apply(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._sum_gradients()
        with self._builder.on_device():
            self._optimizer.prepare_grads()
            self._optimizer.step_with_ready_grads()
        self.discard()

    def discard(self) -> None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._gradients_summed = False

    def mark(self) -> None:
        self._restore = self._shards.copied()

    def rollback(self) -> None:
        if self._restore is None:
            raise ValueError("rollback without mark")
        self._restore()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._named(self._scorer.decoder):
            if self._groups.rank == 0:
                yield name, tensor

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Full float32 gradients, as accumulated by all ranks; on every rank."""
        self._sum_gradients()
        return self._pieces.full(
            self._shards.gather(lambda s: s.parameter.main_grad.flatten()[s.start : s.end]),  # type: ignore[attr-defined]
            torch.float32,
        )

    def save(self, folder: Path) -> None:
        self.snapshot()(folder)

    def snapshot(self) -> Callable[[Path], None]:
        rank, ranks = self._groups.rank, self._groups.size
        shards = self._shards
        weights = checkpoint.own_tensors(self._pieces.full(self._main(), torch.float32), rank, ranks)
        state = {
            moment: self._pieces.full(
                shards.gather(lambda s, moment=moment: shards.state(s).get(moment)),  # type: ignore[misc]
                torch.float32,
            )
            for moment in MOMENTS
        }
        if self._reference is not None and self._config.learner.reference_every:
            state["reference"] = self._named(self._reference.decoder)
        if self._moving is not None and self._moving.average:
            state[TEACHER] = self._pieces.full(self._moving.average.__getitem__, torch.float32)
        named_state = ((f"{kind}/{name}", tensor) for kind, named in state.items() for name, tensor in named)
        own_state = checkpoint.own_tensors(named_state, rank, ranks)
        step = shards.step()
        return lambda folder: checkpoint.write(
            folder, self._form, weights, own_state, step=step, rank=rank, group=self._groups.writers
        )

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        with checkpoint.opened(folder, self._form) as saved:
            self._write_weights(saved.weight)
            step = torch.tensor(float(saved.step), device=self.device)
            for shard in self._shards:
                if shard.main is None:
                    continue
                moments = {
                    m: self._pieces.piece(shard.name, lambda n, m=m: saved.state(f"{m}/{n}")).flatten()  # type: ignore[misc]
                    for m in MOMENTS
                }
                own = {
                    m: t[shard.start : shard.end].view_as(shard.main).to(self.device, copy=True)
                    for m, t in moments.items()
                }
                self._shards.set_state(shard, {"step": step.clone()} | own)
            # Without reference_every it was the run's first model, as the one that was built is.
            if self._reference is not None and self._config.learner.reference_every and saved.has("reference"):
                for name, parameter in self._reference.decoder.named():
                    parameter.copy_(self._pieces.piece(name, lambda n: saved.state(f"reference/{n}")))
            if self._moving is not None:
                self._moving.load(saved, self._pieces, self._main())

    def _learn_from_teacher(self) -> str:
        """Gives the policy's scorer its teacher; returns what identifies one in this process. Raises ConfigError."""
        given, teacher, digest = self._config.learner.teacher, None, ""
        if not given.path:
            return digest
        if self._moving is not None:
            teacher, digest = self._moving.local(), self._moving.digest
        elif given.scored_by == "learner":
            teacher, digest = frozen_teacher(self._config, self._builder, self._scorer, self._score)
        self._scorer.distillation = Distillation(teacher, comparison_of(given))
        return digest

    def _score(self, scorer: Scorer, part: Packed) -> Scores:
        return self._passes.logprobs(scorer, [part])[0]

    def _main(self) -> Callable[[str], Tensor]:
        """The policy's float32 pieces by Megatron's names; collective."""
        return self._shards.gather(lambda s: s.main)

    def _sum_gradients(self) -> None:
        """Sums gradients over ranks, once for each update: also those of the norms of heads and of sequence-parallel
        layers, and of an embedding that is tied to the head, over the stages."""
        if not self._gradients_summed:
            with self._builder.on_device():
                finalize_model_grads([self._ddp])
            self._gradients_summed = True

    def _named(self, decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
        """Full tensors in the model's dtype."""
        parameters = dict(decoder.named())
        return self._pieces.full(lambda name: parameters[name].detach(), self._builder.dtype)

    @torch.no_grad()
    def _write_weights(self, get: Callable[[str], Tensor]) -> None:
        """Writes weights into the model and, without rounding, into the optimizer's copy."""
        for shard in self._shards:
            piece = self._pieces.piece(shard.name, get)
            shard.parameter.copy_(piece)
            if shard.main is not None:
                shard.main.copy_(piece.flatten()[shard.start : shard.end].view_as(shard.main))


def fused_adamw(made: torch.optim.Optimizer) -> torch.optim.AdamW:
    """torch's AdamW, fused into one kernel, over the parameters of the Adam that Megatron has made: where they are
    installed that of Transformer Engine or Apex, whose state Shards cannot read, else torch's own. It has no state
    yet."""
    fused = torch.optim.AdamW([torch.zeros(1)], fused=True)
    # Set and not given: a constructor refuses the views that a distributed optimizer updates.
    fused.param_groups = [{**fused.defaults, **group, "fused": True, "foreach": None} for group in made.param_groups]
    return fused


def _adamw(config: Config, options: Options) -> OptimizerConfig:
    half = config.model.dtype == "bfloat16"
    return OptimizerConfig(
        optimizer="adam",
        lr=config.learner.lr,
        weight_decay=config.learner.weight_decay,
        adam_beta1=config.learner.betas[0],
        adam_beta2=config.learner.betas[1],
        adam_eps=1e-8,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        use_distributed_optimizer=options.distributed_optimizer,
        clip_grad=0.0,
    )
