"""The memory of one learner process, from the cost of its largest micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import AutoConfig, PretrainedConfig

from asyncrl.config import Config, ModelConfig
from asyncrl.config.rules.ranks import ranks_per_node
from asyncrl.errors import ConfigError
from asyncrl.learner.budget.fake_pass import Pass, cost_of_pass, parameters
from asyncrl.weights.channels import device_copies

MASTER, HALF = 4, 2
"""Bytes of a float32 and of a bfloat16 number."""
ADAMW = 2 * MASTER
CONTEXT = 600 << 20
"""An estimate of what CUDA, cuBLAS and NCCL take in each process; everything else is computed."""
BUDGETED = ("torch", "fsdp2")


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    parts: Mapping[str, int]
    """Bytes on the GPU of rank 0, by what they hold."""
    tokens: int
    """Tokens of the micro-batch."""
    flops: float
    """Operations of the micro-batch, forward and backward."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def model_config(config: Config) -> PretrainedConfig:
    """The shapes of `model.path`; of a hub name its config.json alone is downloaded. Raises ConfigError."""
    from asyncrl.model import local_path, resolve_path

    path = resolve_path(config.model) if config.model.path == "quickstart" else local_path(config.model)
    try:
        shapes: PretrainedConfig = AutoConfig.from_pretrained(path or config.model.path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path is {config.model.path!r}, and its config.json, which the memory is computed from, cannot be "
            f"read here ({type(error).__name__}): give a folder, or launch.memory_check off."
        ) from error
    return shapes


def memory_of_learner(config: Config, model: PretrainedConfig) -> LearnerMemory:
    """Memory of one rank. Raises ConfigError for a backend whose memory is not known."""
    if config.learner.backend not in BUDGETED:
        raise ConfigError(
            f"learner.backend is {config.learner.backend}: memory is computed for {' and '.join(BUDGETED)}. Set "
            "launch.memory_check off."
        )
    cost = cost_of_pass(config, model, gpu=True)
    return LearnerMemory(parts(config, cost), cost.tokens, cost.flops)


def parts(config: Config, cost: Pass) -> dict[str, int]:
    """Bytes on one rank's GPU while it computes the second micro-batch of an update: then all gradients exist."""
    learner, weights = config.learner, cost.parameters
    half = config.model.dtype == "bfloat16"
    here = 1 / (ranks_per_node(config) if learner.shard == "node" else learner.ranks)
    if learner.cpu_offload:
        here = 0.0
    trained = weights if not learner.lora.r else int(weights * adapters_share(config, cost))
    shares = {
        "weights": weights * MASTER * here,
        "gradients": trained * MASTER * here,
        "optimizer": trained * ADAMW * here,
        "activations": float(cost.activations),
    }
    if learner.backend == "fsdp2":
        shares["gathered layers"] = float(_gathered(cost, HALF if half else MASTER))
    if learner.kl_coef > 0 and not learner.lora.r:
        shares["reference model"] = weights * MASTER * here
    if teacher := teacher_parameters(config, weights):
        shares["teacher"] = teacher * MASTER * here
    if learner.critic == "separate":
        shares["critic"] = weights * (2 * MASTER + ADAMW) * here
    if learner.minibatches > 1:
        shares["copy to roll back"] = trained * (MASTER + ADAMW) * here
    if copies := device_copies(config):
        shares["weights in flight"] = weights * (HALF if half else MASTER) * float(copies)
    return {name: int(size) for name, size in shares.items()} | {"CUDA context": CONTEXT}


def teacher_parameters(config: Config, policy: int) -> int:
    """Weights of the teacher in this process; `policy`: those of the policy. Raises ConfigError where its shapes cannot
    be read here."""
    from asyncrl.model import local_path, teacher_folder

    given = config.learner.teacher
    if given.moves:
        return policy if given.copied(config.learner.minibatches) else 0
    if not given.path or given.scored_by == "servers":
        return 0
    path = config.learner.teacher.path
    is_local = path == "quickstart" or local_path(ModelConfig(path=path), "learner.teacher.path") is not None
    try:
        return parameters(AutoConfig.from_pretrained(teacher_folder(path) if is_local else path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"learner.teacher.path is {path!r}, and its config.json, which the memory is computed from, cannot be read "
            f"here ({type(error).__name__}): give a folder, or launch.memory_check off."
        ) from error


def adapters_share(config: Config, cost: Pass) -> float:
    """An upper estimate of the share of weights that adapters add: each matrix [out, in] gets rank * (out + in), with
    the smaller side at least an eighth of the larger."""
    side = math.sqrt(cost.layer / 8)
    return min(1.0, 9 * config.learner.lora.r / max(side, 1.0) / 4)


def _gathered(cost: Pass, size: int) -> int:
    """The layer that is computed and the next one, gathered; the embeddings and the head, which stay gathered; and the
    gradient of a layer before it is reduced, in its own type and in float32."""
    return (2 * cost.layer + cost.rest) * size + cost.layer * (size + MASTER)
