"""One forward and backward pass of the real scorer, and one update of the real optimizer, on tensors without data.

Fake tensors have shapes, types and a lifetime, so every allocation of the pass happens, and no memory is taken. Where
the layers of a model are alike, two shallow copies of it tell what each further layer adds, so that an 8B model takes
seconds on a CPU.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from asyncrl.config import Config
from asyncrl.learner.backends.comparison import TeacherStates
from asyncrl.learner.backends.hf.row_attention import in_one_call, varlen
from asyncrl.learner.backends.hf.scorer import Scorer, adamw, layers
from asyncrl.learner.backends.protocol import Packed, Want
from asyncrl.learner.budget.counting import Counter
from asyncrl.learner.distillation.divergence import Comparison


@dataclass(frozen=True, slots=True)
class Pass:
    """The cost of one micro-batch of the most tokens that it may hold, in rows of the greatest length."""

    tokens: int
    parameters: int
    """Weights of the model; tied ones once."""
    layer: int
    """Weights of the largest decoder layer."""
    rest: int
    """Weights outside the layers: embeddings, head, last norm."""
    optimizer: int
    """Bytes of the optimizer's state."""
    activations: int
    """Most bytes alive at once beyond weights, gradients and the optimizer's state."""
    flops: float
    """Forward and backward: matrix products and attention, those that checkpointing and the head repeat included."""


SHALLOW = 2
"""Layers of the shallower copy; the other one has one more."""


class Counts(NamedTuple):
    """What is counted in one model; each number grows by the same amount with every further layer that is alike."""

    parameters: int
    rest: int
    optimizer: int
    most_in_pass: int
    """Bytes alive at once in the forward and backward pass, as Pass.activations."""
    most_in_update: int
    flops: float


def cost_of_pass(config: Config, model: PretrainedConfig, *, tokens: int | None = None, gpu: bool = False) -> Pass:
    """`tokens`: other than `learner.tokens_per_micro_batch`. `gpu`: with the attention that a GPU computes."""
    part = fullest(config, tokens or config.learner.tokens_per_micro_batch)
    with torch.device("meta"):
        built = layers(AutoModelForCausalLM.from_config(model))
    depth = len(built)
    if depth > SHALLOW + 1 and _alike(model, built):
        first, second = (count(config, _with_layers(model, n), part, gpu) for n in (SHALLOW, SHALLOW + 1))
        counts = Counts._make(a + (b - a) * (depth - SHALLOW) for a, b in zip(first, second, strict=True))
    else:
        counts = count(config, model, part, gpu)
    return Pass(
        tokens=len(part.token_ids),
        parameters=counts.parameters,
        layer=max(sum(p.numel() for p in layer.parameters()) for layer in built),
        rest=counts.rest,
        optimizer=counts.optimizer,
        activations=max(counts.most_in_pass, counts.most_in_update),
        flops=counts.flops,
    )


def count(config: Config, model: PretrainedConfig, part: Packed, gpu: bool) -> Counts:
    """Runs an update and a pass over `part` with a model of all its layers."""
    scorer = fake_scorer(config, model)
    if gpu and config.model.dtype == "bfloat16" and varlen() is not None:
        scorer.attention = in_one_call
    parameters = list(scorer.parameters())
    optimizer = adamw(scorer, config)
    for parameter in parameters:  # from the second micro-batch on, all gradients exist while activations do
        parameter.grad = torch.empty_like(parameter)
    present = [*parameters, *(p.grad for p in parameters if p.grad is not None), *scorer.buffers()]
    with Counter(present) as update:
        torch.nn.utils.clip_grad_norm_(parameters, config.learner.max_grad_norm)
        optimizer.step()
    with Counter(present) as counted:
        scores = scorer(part, *_teacher(config, model, part, present))
        loss = scores.logprobs.to("cpu").sum()
        if scores.hidden is not None:
            loss = loss + scores.hidden.sum()
        if config.learner.entropy_coef:
            loss = loss + scores.entropy.to("cpu").sum()
        del scores
        loss.backward()
    state = sum(x.nbytes for held in optimizer.state.values() for x in held.values())
    total = sum(p.numel() for p in parameters)
    inside = sum(p.numel() for layer in layers(scorer.model) for p in layer.parameters())
    return Counts(total, total - inside, state, counted.peak, update.peak - state, counted.flops)


def _alike(model: PretrainedConfig, built: list[nn.Module]) -> bool:
    """Whether all layers have the same weights, and no field has another value for one of them."""
    if getattr(model, "num_hidden_layers", None) != len(built):
        return False
    weights = {tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in built}
    return len(weights) == 1 and all(value == values[0] for values in _by_layer(model).values() for value in values)


def _with_layers(model: PretrainedConfig, number: int) -> PretrainedConfig:
    """The model with its first layers alone."""
    shallow = copy.deepcopy(model)
    for name, values in _by_layer(model).items():
        setattr(shallow, name, values[:number])
    shallow.num_hidden_layers = number
    return shallow


def _by_layer(model: PretrainedConfig) -> dict[str, Any]:
    """The fields that have a value for each layer."""
    depth = model.num_hidden_layers
    return {name: v for name, v in vars(model).items() if isinstance(v, list | tuple) and len(v) == depth}


def _teacher(
    config: Config, model: PretrainedConfig, part: Packed, present: list[torch.Tensor]
) -> tuple[TeacherStates, Comparison] | tuple[()]:
    """A teacher of the policy's shapes, if the update compares with one; its head is not the pass's."""
    given = config.learner.teacher
    if not given.path or given.into != "loss" or given.scored_by == "servers":
        return ()
    head = next(x for x in present if x.shape[-1] == model.hidden_size and x.shape[0] == model.vocab_size)
    return TeacherStates(torch.empty(int(part.mask.sum()), model.hidden_size), head.detach()), Comparison()


def fullest(config: Config, tokens: int) -> Packed:
    """A micro-batch of `tokens` tokens in rows of `env.max_tokens`, none shared, every answer as long as possible; one
    row may be longer than `tokens`."""
    row = config.env.max_tokens
    lengths = [row] * max(1, tokens // row)
    if (left := tokens - sum(lengths)) > 1:
        lengths.append(left)
    wants: frozenset[Want] = frozenset(("logprobs", "entropy"))
    if config.learner.critic == "shared":
        wants |= {"hidden"}
    mask = torch.cat([torch.arange(n) > 0 for n in lengths])
    # No token equals another, so that no prefix is computed once for several rows.
    most = config.actors.max_kept if config.actors.truncated else 0
    kept = torch.zeros(int(mask.sum()), most, dtype=torch.int32) if most else None
    return Packed(torch.arange(sum(lengths)), mask, tuple(lengths), wants, kept)


def fake_scorer(config: Config, model: PretrainedConfig) -> Scorer:
    """The scorer as the backend builds it, on fake tensors of the CPU. In bfloat16 `torch` casts the float32
    weights of each layer, `fsdp2` gathers them."""
    half = config.model.dtype == "bfloat16"
    sharded = config.learner.backend != "torch"
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(model)
    scorer = Scorer(
        built,
        temperature=config.actors.temperature,
        compute=torch.bfloat16 if half and not sharded else torch.float32,
        activation_checkpointing=config.learner.activation_checkpointing,
    )
    if half and sharded:
        scorer.to(torch.bfloat16)
    _without_data(scorer)
    return scorer


def parameters(model: PretrainedConfig) -> int:
    """The number of weights; tied ones once."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(model).parameters())


def _without_data(module: nn.Module) -> None:
    """Replaces the tensors of a module on the device `meta`, which no other tensor can meet, by fake ones on a CPU."""
    made: dict[int, Any] = {}
    held = [tensors for part in module.modules() for tensors in (part._parameters, part._buffers)]
    before = [tensor for tensors in held for tensor in tensors.values() if tensor is not None]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for old in before:  # tied weights stay tied
            made.setdefault(id(old), torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu"))
    for old in before:
        if isinstance(old, nn.Parameter) and not isinstance(made[id(old)], nn.Parameter):
            made[id(old)] = nn.Parameter(made[id(old)])
    for tensors in held:
        tensors.update({name: made[id(old)] for name, old in tensors.items() if old is not None})
