"""Megatron-core: each matrix shared by `tensor_parallel` ranks, and so many such groups as learner.ranks has room for.

    ranks 0 1 | 2 3   tensor_parallel 2 of 4: 0 and 1 compute one micro-batch together, 2 and 3 another (rounds.py)

Every weight, moment and gradient has its Hugging Face name and shape once it is put together, one at a time; a
checkpoint holds them so, spread over files of all ranks, and is loaded at any other number and any other options.
With `model.dtype: bfloat16` layers compute in it; gradients are summed in float32, and the optimizer's weights are it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from transformers import PreTrainedModel

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backends import megatron_files as files
from asyncrl.learner.backends.fsdp2 import COLLECTIVES
from asyncrl.learner.backends.megatron_model import Decoder, Options, Scorer, build, fill, layout_of
from asyncrl.learner.backends.megatron_names import from_hf, placed, to_hf
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.learner.backends.rounds import Rounds
from asyncrl.learner.backends.scorer import differs
from asyncrl.model import load_model
from asyncrl.plugins import check_options

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class _Shard:
    """What this rank's optimizer updates of a parameter."""

    name: str
    """Megatron's."""
    parameter: Tensor
    """This rank's piece; the ranks that compute other micro-batches hold it too."""
    main: Tensor | None
    """float32, elements `start` to `end` of the flat piece; None: other ranks update all of it."""
    start: int
    end: int


class MegatronBackend:
    """One rank of it. Joins the process group that there is; where there is none it trains alone."""

    def __init__(self, config: Config, model: PreTrainedModel | None = None, *, device: str | None = None) -> None:
        """Builds from `config.model`, or from `model`, which it takes apart; every rank reads all of it and keeps its
        pieces. Raises ConfigError for options that do not fit ranks or model."""
        options = _options(config)
        if not dist.is_initialized():
            dist.init_process_group(COLLECTIVES, store=HashStore(), rank=0, world_size=1)
        self.rank, self._ranks = dist.get_rank(), dist.get_world_size()
        wait = timedelta(seconds=config.learner.collective_s)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        _share_out(options, self._ranks, wait)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
            model_parallel_cuda_manual_seed(config.learner.seed)
        else:
            from asyncrl.learner.backends.megatron_cpu import stand_in  # nobody else shall meet it

            stand_in()
        self._writers = dist.new_group(backend="gloo", timeout=wait)
        self._tp = parallel_state.get_tensor_model_parallel_group()
        self._dp = parallel_state.get_data_parallel_group()
        self.dp_size = self._dp.size()
        self._rounds = Rounds(self._dp.rank(), self.dp_size, self._dp)
        self._config, self._options = config, options
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)

        source = model or load_model(config.model, torch.float32)
        self._form = files.Form.of(source)
        self._layout = layout_of(source.config, options.tensor_parallel)
        decoder = self._decoder(source)
        buckets = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=options.distributed_optimizer,
        )
        self._ddp = DistributedDataParallel(decoder.config, buckets, decoder)
        self._scorer = Scorer(decoder, self._ddp, self._layout, config.actors.temperature)
        _check(self._scorer, source, config)
        self._reference: Scorer | None = None
        if config.learner.kl_coef > 0:
            # What it began as is the run's first model, whatever `model` holds.
            frozen = self._decoder(load_model(config.model, torch.float32)).requires_grad_(False)
            self._reference = Scorer(frozen, frozen, self._layout, config.actors.temperature)
        with self._optimizing():
            self._optimizer = get_megatron_optimizer(_adamw(config, options), [self._ddp])
        (self._inner,) = self._optimizer.chained_optimizers
        if not isinstance(self._inner.optimizer, torch.optim.AdamW):
            raise ConfigError(
                f"learner.backend megatron met {type(self._inner.optimizer).__module__}'s Adam, whose state it does "
                "not read: uninstall Apex or Transformer Engine there, or use learner.backend fsdp2."
            )
        state = source.state_dict()
        self._write_weights(state.__getitem__)
        self._whole_gradient = False
        self._marked: tuple[list[Tensor], list[Tensor | None], list[dict[str, Tensor]]] | None = None

    def logprobs(self, parts: Sequence[Packed], *, reference: bool = False) -> list[Scores]:
        scorer = self._reference if reference else self._scorer
        if scorer is None:
            raise ValueError("there is no reference model: learner.kl_coef is 0")
        return self._rounds.logprobs(scorer, parts)

    def refresh_reference(self) -> None:
        if self._reference is None:
            raise ValueError("there is no reference model: learner.kl_coef is 0")
        self._reference.decoder.load_state_dict(self._scorer.decoder.state_dict())

    def accumulate(self, parts: Sequence[Packed], loss: Callable[[int, Scores], Tensor]) -> None:
        self._rounds.accumulate(self._scorer, parts, loss)

    def clip(self, max_norm: float) -> float:
        self._sum_gradients()
        with self._optimizing():
            self._optimizer.prepare_grads()
            return float(self._inner.clip_grad_norm(max_norm))

    def apply(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._sum_gradients()
        with self._optimizing():
            self._optimizer.prepare_grads()
            self._optimizer.step_with_ready_grads()
        self.discard()

    def discard(self) -> None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._whole_gradient = False

    def mark(self) -> None:
        shards = list(self._shards())
        self._marked = (
            [s.parameter.detach().clone() for s in shards],
            [None if s.main is None else s.main.detach().clone() for s in shards],
            [{k: t.clone() for k, t in self._state_of(s).items()} for s in shards],
        )

    @torch.no_grad()
    def rollback(self) -> None:
        if self._marked is None:
            raise ValueError("rollback without mark")
        for shard, parameter, main, state in zip(self._shards(), *self._marked, strict=True):
            shard.parameter.copy_(parameter)
            if shard.main is not None and main is not None:
                shard.main.copy_(main)
                self._inner.optimizer.state[shard.main] = {k: t.clone() for k, t in state.items()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._named(self._scorer.decoder):
            if self.rank == 0:
                yield name, tensor.to(self._dtype)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Whole, as accumulated by all ranks, float32; on every rank."""
        self._sum_gradients()
        return self._shared(lambda s: s.parameter.main_grad.flatten()[s.start : s.end])  # type: ignore[attr-defined]

    def save(self, folder: Path) -> None:
        self.snapshot()(folder)

    def snapshot(self) -> Callable[[Path], None]:
        weights = files.mine(self._shared(lambda s: s.main), self.rank, self._ranks)
        state: dict[str, Iterator[tuple[str, Tensor]]] = {
            moment: self._shared(lambda s, moment=moment: self._state_of(s).get(moment))  # type: ignore[misc]
            for moment in MOMENTS
        }
        if self._reference is not None and self._config.learner.reference_every:
            state["reference"] = self._named(self._reference.decoder)
        beside = files.mine(
            ((f"{kind}/{n}", t) for kind, named in state.items() for n, t in named), self.rank, self._ranks
        )
        return lambda folder: files.write(
            folder, self._form, weights, beside, step=self._step(), rank=self.rank, group=self._writers
        )

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        with files.opened(folder, self._form) as saved:
            self._write_weights(saved.weight)
            step = torch.tensor(float(saved.step))
            for shard in self._shards():
                if shard.main is None:
                    continue
                moments = {
                    m: self._piece(shard.name, lambda n, m=m: saved.beside(f"{m}/{n}")).flatten()  # type: ignore[misc]
                    for m in MOMENTS
                }
                self._inner.optimizer.state[shard.main] = {"step": step.clone()} | {
                    m: t[shard.start : shard.end].view_as(shard.main).to(self.device, copy=True)
                    for m, t in moments.items()
                }
            if self._reference is not None and self._config.learner.reference_every:
                for name, parameter in self._reference.decoder.named_parameters():
                    parameter.copy_(self._piece(name, lambda n: saved.beside(f"reference/{n}")))

    def _decoder(self, source: PreTrainedModel) -> Decoder:
        checkpointing = self._config.learner.activation_checkpointing
        decoder = build(source.config, self._layout, self._options, self._dtype, checkpointing=checkpointing)
        fill(decoder, source.state_dict(), self._layout)
        decoder.to(self.device)
        return decoder

    def _sum_gradients(self) -> None:
        """Over ranks, once for each update: what norms of heads and of sequence-parallel layers lack comes in here."""
        if not self._whole_gradient:
            with self._optimizing():
                finalize_model_grads([self._ddp])
            self._whole_gradient = True

    def _optimizing(self) -> AbstractContextManager[object]:
        if self.device.type == "cuda":
            return nullcontext()
        from asyncrl.learner.backends.megatron_cpu import OptimizerOnCpu

        return OptimizerOnCpu()

    def _shards(self) -> Iterator[_Shard]:
        optimizer = self._inner
        for name, parameter in self._scorer.decoder.named_parameters():
            if not isinstance(optimizer, DistributedOptimizer):
                main = getattr(parameter, "main_param", parameter)
                yield _Shard(name, parameter, main, 0, parameter.numel())
            elif parameter in optimizer.model_param_group_index_map:
                group, place = optimizer.model_param_group_index_map[parameter]
                held = optimizer._get_model_param_range_map(parameter)["param"]
                main = optimizer.optimizer.param_groups[group]["params"][place]
                yield _Shard(name, parameter, main, held.start, held.end)
            else:
                yield _Shard(name, parameter, None, 0, 0)

    def _state_of(self, shard: _Shard) -> dict[str, Tensor]:
        return {} if shard.main is None else self._inner.optimizer.state.get(shard.main, {})

    def _step(self) -> int:
        """Updates so far."""
        steps = [int(state["step"]) for shard in self._shards() if (state := self._state_of(shard))]
        return max(steps, default=0)

    def _shared(self, of: Callable[[_Shard], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors with Hugging Face names from what each rank has of them; None counts as zeros."""
        for shard in self._shards():
            piece = torch.zeros(shard.parameter.numel(), device=self.device)
            found = of(shard)
            if found is not None:
                piece[shard.start : shard.end] = found.detach().flatten()
            if self._options.distributed_optimizer:
                dist.all_reduce(piece, group=self._dp)
            yield from self._together(shard.name, piece.view_as(shard.parameter))

    def _named(self, decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in decoder.named_parameters():
            yield from self._together(name, parameter.detach())

    def _together(self, name: str, piece: Tensor) -> Iterator[tuple[str, Tensor]]:
        pieces = [piece]
        if self._tp.size() > 1 and placed(name)[1] != "whole":
            pieces = [torch.empty_like(piece) for _ in range(self._tp.size())]
            dist.all_gather(pieces, piece.contiguous(), group=self._tp)
        yield from to_hf(name, pieces, self._layout).items()

    def _piece(self, name: str, get: Callable[[str], Tensor]) -> Tensor:
        return from_hf(name, get, self._layout, self._tp.rank(), self._tp.size())

    @torch.no_grad()
    def _write_weights(self, get: Callable[[str], Tensor]) -> None:
        """Into the model and, without rounding, into what the optimizer updates."""
        for shard in self._shards():
            piece = self._piece(shard.name, get)
            shard.parameter.copy_(piece)
            if shard.main is not None:
                shard.main.copy_(piece.flatten()[shard.start : shard.end].view_as(shard.main))


def _options(config: Config) -> Options:
    given = config.learner.backend_options
    try:
        check_options(Options, given, "learner.backend_options")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.learner.cpu_offload:
        raise ConfigError("learner.cpu_offload is true, which learner.backend megatron does not do: use fsdp2.")
    return Options(**given)


def _share_out(options: Options, ranks: int, wait: timedelta) -> None:
    """Which ranks compute together; for the process, once. Raises ConfigError."""
    size = options.tensor_parallel
    if size < 1 or ranks % size:
        raise ConfigError(
            f"learner.backend_options.tensor_parallel is {size}, which does not divide learner.ranks = {ranks}: "
            "choose a divisor."
        )
    if not parallel_state.model_parallel_is_initialized():
        minutes = wait.total_seconds() / 60
        parallel_state.initialize_model_parallel(size, distributed_timeout_minutes=minutes)
    elif parallel_state.get_tensor_model_parallel_world_size() != size:
        raise ValueError("this process shares its model out otherwise already")


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


def _check(scorer: Scorer, source: PreTrainedModel, config: Config) -> None:
    """As scorer.check: what a family does that this model does not shows before anything is trained."""
    worst = differs(source, scorer, config.actors.temperature)
    if not worst < (0.3 if config.model.dtype == "bfloat16" else 1e-2):
        raise ConfigError(
            f"model.path is {config.model.path!r}, a {type(source).__name__}: as a model of Megatron-core its rows "
            f"differ from its own forward pass by {worst:.2g} nats. Use learner.backend fsdp2."
        )
