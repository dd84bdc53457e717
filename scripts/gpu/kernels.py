"""Part 1: the learner's attention against its reference, and what a training step costs.

attention    ragged packs with and without shared prefixes, and one long row: output and gradients against an eager
             reference in float32; a pack of lengths that were never seen against the same pack again (a plan built
             for each length would show), with cuDNN's attention on and off
backends     `fsdp2` alone on its GPU against `torch`: the same logprobs
learner      forward, backward and AdamW of Qwen3-0.6B's shape at 4k, 16k and 64k tokens a row, and ragged rows of
             300: tokens a second, MFU, and peak memory against the one that asyncrl/learner/budget computes
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.config import Config
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.backends.protocol import Packed
from asyncrl.learner.budget.counting import Counter
from asyncrl.learner.budget.memory import memory_of_learner
from scripts.bench.learner import TFLOPS, operations, packed, rows
from scripts.gpu import learner_attention, models
from scripts.gpu.report import Report

BF16, F32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: (1e-2, 2e-2), F32: (1e-5, 1e-4)}
"""Of the output and of the gradients, relative."""
NEW_LENGTHS = 3.0
"""Lengths that were never seen may cost this many times what they cost again."""
AGREE = 0.01
"""Nats, mean over tokens: two backends in bfloat16."""
BUDGET = (0.85, 1.15)
"""Measured peak over the computed one."""
RAGGED_MEAN = 300


@dataclass(frozen=True)
class Size:
    """What the part computes: on a GPU, or as small as a test needs."""

    shape: models.Shape
    heads: tuple[int, int, int]
    pack: int
    """Tokens of a micro-batch of ragged rows."""
    mean: int
    """Tokens of a ragged row."""
    long: int
    """Tokens of the long row that is compared with the reference, whose memory is quadratic."""
    learner: dict[str, tuple[tuple[int, ...], bool, float | None]]
    """Name -> lengths of rows, activation checkpointing, goal in tokens a second."""
    steps: int


def size(report: Report) -> Size:
    if report.tiny:
        learner = {"4k": ((64,) * 4, False, None), "16k": ((256,), True, None), "64k": ((512,), True, None)}
        return Size(models.TINY, (4, 2, 32), 256, 20, 64, learner, 1)
    learner = {
        "4k": ((4096,) * 4, False, 80_000.0),
        "16k": ((16384,), True, 40_000.0),
        "64k": ((65536,), True, 18_000.0),
    }
    return Size(models.QWEN3_06B, (16, 8, 128), 16384, RAGGED_MEAN, 4096, learner, 3)


def run(report: Report) -> None:
    chosen = size(report)
    report.section("attention", 20, lambda: attention(report, chosen))
    report.section("new lengths", 25, lambda: new_lengths(report, chosen))
    rates: dict[str, float] = {}
    for name, (lengths, checkpointing, goal) in chosen.learner.items():
        if name != "64k":
            report.section(
                f"learner {name}", 30,
                lambda n=name, le=lengths, c=checkpointing, g=goal: train(report, chosen, n, le, c, g, rates),
            )  # fmt: skip
    lengths = ragged(chosen, seed=7)
    report.section("learner ragged", 25, lambda: train(report, chosen, "ragged", lengths, False, None, rates))
    if {"4k", "ragged"} <= rates.keys():
        report.at_least("ragged rows over rows of 4k", 0.9, rates["ragged"] / rates["4k"])
    long, checkpointing, goal = chosen.learner["64k"]
    report.section("learner 64k", 45, lambda: train(report, chosen, "64k", long, checkpointing, goal, rates))
    report.section("fsdp2 against torch", 30, lambda: agree(report, chosen))


def ragged(chosen: Size, seed: int) -> tuple[int, ...]:
    """Lengths of long-tailed rows that fill a pack."""
    drawn = np.random.default_rng(seed).lognormal(np.log(chosen.mean) - 0.25, 0.7, chosen.pack)
    lengths = np.clip(drawn, 2, chosen.pack // 4).astype(int)
    fitting = int((lengths.cumsum() <= chosen.pack).sum())
    return tuple(lengths[:fitting].tolist())


def attention(report: Report, chosen: Size) -> None:
    device = "cuda" if report.on_gpu else "cpu"
    cases = {
        "ragged rows": (ragged(chosen, 0), 0),
        "ragged rows with shared prefixes": (ragged(chosen, 1), chosen.mean // 2),
        "a long row behind a long prefix": ((chosen.long, chosen.long), chosen.long // 2),
    }
    for dtype in (BF16, F32):
        for name, (lengths, shared) in cases.items():
            made = learner_attention.case(lengths, shared, chosen.heads, device, dtype)
            out, gradient = learner_attention.errors(made)
            kind = str(dtype).removeprefix("torch.")
            report.at_most(f"attention, {name}, {kind}: output", TOLERANCE[dtype][0], out)
            report.at_most(f"attention, {name}, {kind}: gradients", TOLERANCE[dtype][1], gradient)
    report.figure("rows and longest of the ragged pack", [len(ragged(chosen, 0)), max(ragged(chosen, 0))])


def new_lengths(report: Report, chosen: Size) -> None:
    """Milliseconds of attention, forward and backward, over one pack."""
    device = "cuda" if report.on_gpu else "cpu"
    made = learner_attention.case(ragged(chosen, 2), 0, chosen.heads, device, BF16)
    _attend(made)  # what is loaded at the first use is not measured
    for seed, cudnn in ((3, True), (4, False)):
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        try:
            made = learner_attention.case(ragged(chosen, seed), chosen.mean // 2, chosen.heads, device, BF16)
            first, again = seconds(lambda: _attend(made)), seconds(lambda: _attend(made))  # noqa: B023
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)
        how = f"cuDNN {'on' if cudnn else 'off'}"
        report.figure(f"attention of a ragged pack again, {how} [ms]", 1e3 * again)
        report.at_most(f"lengths never seen over lengths seen, {how}", NEW_LENGTHS, first / again)


def _attend(made: learner_attention.Case) -> None:
    torch.autograd.grad(learner_attention.attention(made).float().sum(), (made.query, made.key, made.value))


def seconds(run: Callable[[], object]) -> float:
    _wait()
    at = time.perf_counter()
    run()
    _wait()
    return time.perf_counter() - at


def _free() -> None:
    """Gives back what the model before took."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def asked(lengths: Sequence[int], checkpointing: bool, **learner: Any) -> Config:
    longest, total = max(lengths), sum(lengths)
    own = {"backend": "torch", "activation_checkpointing": checkpointing, "tokens_per_micro_batch": total}
    return Config.model_validate(
        {
            "model": {"dtype": "bfloat16"},
            "env": {"max_tokens": longest},
            "actors": {"max_new_tokens": max(1, longest // 2)},
            "learner": own | learner,
        }
    )


def train(
    report: Report, chosen: Size, name: str, lengths: Sequence[int], checkpointing: bool, goal: float | None,
    rates: dict[str, float],
) -> None:  # fmt: skip
    device = "cuda" if report.on_gpu else "cpu"
    _free()
    config = asked(lengths, checkpointing)
    budget = memory_of_learner(config, models.config(chosen.shape))
    backend = TorchBackend(config, models.random_model(chosen.shape, device=device).cpu(), device=device)
    part = packed(rows(chosen.shape["vocab_size"], list(lengths)))
    total = sum(lengths)

    def step() -> None:
        backend.accumulate([part], lambda _, scores: -scores.logprobs.sum() / total)
        backend.clip(1.0)
        backend.apply(1e-6)

    step()
    peak = peak_of(backend, step)
    took = seconds(lambda: [step() for _ in range(chosen.steps)]) / chosen.steps
    rates[name] = total / took
    what = f"learner, {name}"
    if goal is None:
        report.figure(f"{what} [tokens/s]", rates[name])
    else:
        report.at_least(f"{what} [tokens/s]", goal, rates[name])
    achieved = sum(operations(chosen.shape, n) for n in lengths) / took / 1e12
    report.figure(f"{what} [TFLOP/s of the model]", achieved)
    name_of_card = torch.cuda.get_device_name() if report.on_gpu else ""
    for card in (flops for known, flops in TFLOPS.items() if known in name_of_card):
        report.figure(f"{what} [MFU]", achieved / card)
    computed = sum(size for of, size in budget.parts.items() if of != "CUDA context")
    report.figure(f"{what}: peak [GiB], computed [GiB]", [round(x / 2**30, 4) for x in (peak, computed)])
    least, most = BUDGET
    report.judge(f"{what}: peak over computed", f"{least} to {most}", peak / computed, least <= peak / computed <= most)


def peak_of(backend: TorchBackend, step: Callable[[], None]) -> float:
    """Bytes: of the GPU's allocator; on a CPU, of the tensors that were alive at once."""
    if backend.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated())
    held = [*backend._scorer.parameters(), *backend._scorer.buffers()]
    held += [x for state in backend._optimizer.state.values() for x in state.values()]
    with Counter(held) as counted:
        step()
    return float(sum({x.untyped_storage().data_ptr(): x.nbytes for x in held}.values()) + counted.peak)


def agree(report: Report, chosen: Size) -> None:
    """`fsdp2` alone on its GPU must compute what `torch` does."""
    device = "cuda" if report.on_gpu else "cpu"
    lengths = ragged(chosen, 5)
    part: Packed = packed(rows(chosen.shape["vocab_size"], list(lengths)))
    found = []
    for backend in (TorchBackend, Fsdp2Backend):
        config = asked(lengths, False, backend="torch" if backend is TorchBackend else "fsdp2")
        model = models.random_model(chosen.shape, device=device).cpu()
        [scores] = backend(config, model, device=device).logprobs([part])
        found.append(scores.logprobs.cpu()[part.mask])
        _free()
    report.at_most("|logprob of fsdp2 - of torch|, mean [nats]", AGREE, float((found[0] - found[1]).abs().mean()))
