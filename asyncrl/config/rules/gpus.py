"""Rules about GPUs: how many a process has, and what shares one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from asyncrl.config.tree import Tree

KINDS = ("actor", "learner", "buffer", "weights", "scorer")
"""Kinds of roles."""
SGLANG_SPLIT = ("tp_size", "tensor_parallel_size", "tp")
"""Names of one option of a SGLang server."""


def of_gpus(c: Tree) -> list[str]:
    problems = _one_gpu(c)
    for role, gpus in c.launch.gpus.items():
        kind = role.partition("-")[0]
        if kind not in KINDS:
            problems.append(f"launch.gpus names {role!r}: expected {', '.join(KINDS)}, or one such as actor-0.")
        if gpus < 0 or (gpus > 1 and gpus != int(gpus)):
            problems.append(f"launch.gpus.{role} is {gpus:g}: expected a whole number, or a share below 1.")
        elif kind == "learner" and gpus > 1:
            problems.append(
                f"launch.gpus.{role} is {gpus:g}, and a rank of the learner computes on one GPU: set "
                "launch.gpus.learner 1, which is for each rank, and learner.ranks to the number of GPUs."
            )
    actor, parallel = c.launch.gpus.get("actor"), engine_gpus(c)
    if actor is not None and parallel > 1 and actor != parallel:
        problems.append(
            f"launch.gpus.actor is {actor:g} and {_split(c)[0]} {parallel}: an actor needs as many GPUs as its model "
            "is split over; leave the former out, or give the same."
        )
    return problems


def engine_gpus(c: Tree) -> int:
    """GPUs that the engine of one actor computes on: none for `hf`, and none for servers that run elsewhere."""
    if c.actors.engine in ("hf", "vllm_server") or c.actors.engine_options.get("urls"):
        return 0
    parallel = str(_split(c)[1])
    return max(1, int(parallel)) if parallel.isdecimal() else 1


def _split(c: Tree) -> tuple[str, Any]:
    """The field that says over how many GPUs the engine splits the model, and its value."""
    options = c.actors.engine_options
    if c.actors.engine != "sglang":
        return "actors.engine_options.tensor_parallel", options.get("tensor_parallel", 1)
    given = options.get("args")
    args = given if isinstance(given, dict) else {}
    name = next((name for name in SGLANG_SPLIT if name in args), SGLANG_SPLIT[0])
    return f"actors.engine_options.args.{name}", args.get(name, 1)


def quantization(c: Tree) -> str:
    """How the engine's weights are quantized, by `actors.engine_options.args`; empty: they are not."""
    args = c.actors.engine_options.get("args")
    return str(args.get("quantization") or "") if isinstance(args, dict) else ""


def of_quantization(c: Tree, self_correcting: Collection[str]) -> list[str]:
    """A quantized engine samples from another policy than the one that is trained, however fresh the data are."""
    how, learner = quantization(c), c.learner
    corrected = learner.proximal != "behaviour" and any(x.get("name", "none") != "none" for x in learner.corrections)
    if not how or corrected or learner.unsafe or ":" in learner.loss or learner.loss in self_correcting:
        return []
    return [
        f"actors.engine_options.args.quantization is {how} and no importance correction is applied: the engine samples "
        "from another policy than the one in training. Use learner.proximal recompute and learner.corrections, for "
        "instance [{name: tis}], or learner.unsafe true."
    ]


def _one_gpu(c: Tree) -> list[str]:
    if c.weights.channel != "cuda_ipc":
        return []
    problems = []
    if c.launch.backend == "ray":
        problems.append(
            "launch.backend is ray and weights.channel cuda_ipc, which is the memory of one GPU: use launch.backend "
            "local, or weights.channel nccl."
        )
    if c.learner.ranks > 1:
        problems.append(
            f"learner.ranks is {c.learner.ranks} and weights.channel cuda_ipc, which is for a learner and engines on "
            "one GPU: use weights.channel nccl."
        )
    share = c.actors.engine_options.get("gpu_memory", 0.9 if c.actors.engine == "vllm" else 0.0)
    if isinstance(share, int | float) and c.learner.gpu_memory + c.actors.count * share > 1:
        problems.append(
            f"learner.gpu_memory is {c.learner.gpu_memory:g} and actors.engine_options.gpu_memory {share:g} for each "
            f"of {c.actors.count} actors: with weights.channel cuda_ipc they share one GPU; together at most 1, for "
            "instance 0.5 and 0.35."
        )
    return problems
