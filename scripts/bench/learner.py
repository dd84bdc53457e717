"""What a training step costs: real tokens a second and peak memory, forward + backward + AdamW.

    padded            plain transformers: rows padded to the longest, all logits
    packed            rows laid end to end, all logits
    packed+chunked    the learner's own backend: rows laid end to end, logits made in chunks and thrown away
    compiled          the same with learner.compile: what compiling took is not in it, and is said
    lora              packed+chunked with learner.lora.r 16

By default a model of 10M parameters on the CPU, rows of long-tailed lengths, all variants over the same rows. Every
variant is a process of its own. CPU seconds are compared, not the clock's: other load on the machine leaves them alone.
Peak memory is that of the step, over what the model and its optimizer take.

    (--without leaves out compiled, which needs a C++ compiler, or lora, which needs peft)

    --preset qwen3-0.6b    on a CUDA GPU, random weights, bfloat16 over float32 masters, activation checkpointing: one
                           row of 4k, 16k and 64k tokens a micro-batch. Tokens a second, MFU (of the model's own
                           operations: what checkpointing computes again does not count) and peak memory.
                           Without a GPU it says what it would run.

Prints a table, writes bench/results/learner.json, and what there is so far to learner.part.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import needs
import numpy as np
import torch
from results import finish, keep
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrl.config import Config
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.learner.packing import pack, row_cost

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
LEARNER: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed+chunked": {},
    "compiled": {"compile": True},
    "lora": {"lora": {"r": 16}},
}
VARIANTS = ("padded", *LEARNER)
ROWS, LONGEST = 16, 768
SEQUENCES = (4096, 16384, 65536)
TARGETS = {16384: 40_000, 65536: 18_000}
"""Tokens a second on one H100."""
TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Dense bfloat16, as their maker states it."""
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("small", "qwen3-0.6b"), default="small")
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "learner.json")
    parser.add_argument("--compile", action="store_true", help="learner.compile, on a GPU")
    parser.add_argument("--without", nargs="*", choices=("compiled", "lora"), default=[], help="on the CPU")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.cell:
        small = given.preset == "small"
        cell = on_cpu(given.cell, given.steps) if small else on_gpu(int(given.cell), given.steps, given.compile)
        print(json.dumps(cell))
        return
    if given.preset == "qwen3-0.6b" and not torch.cuda.is_available():
        print(would_run(given.steps, given.compile))
        return
    wanted = [variant for variant in VARIANTS if variant not in given.without]
    cells = wanted if given.preset == "small" else [str(n) for n in SEQUENCES]
    if "lora" in cells:
        remedy = "pip install -e '.[lora]', or leave it out (--without lora)"
        needs.packages("peft", of="the variant lora", remedy=remedy)
    if "compiled" in cells:
        remedy = "install a C++ compiler, or leave it out (--without compiled)"
        needs.program(os.environ.get("CXX", "g++"), of="the variant compiled", remedy=remedy)
    kept = json.loads(given.out.read_text()) if given.out.exists() else {}
    machine = {"platform": platform.platform(), "torch": torch.__version__, "threads": given.threads}
    found: dict[str, Found] = {}
    kept[given.preset + "+compile" * given.compile] = {
        "machine": machine,
        "steps": given.steps,
        "cells": found,
        "shares": shares(),
    }
    for cell in cells:
        found[cell] = _in_a_process(cell, given)
        keep(given.out, kept)
    print(cpu_table(found) if given.preset == "small" else gpu_table(found))
    finish(given.out, kept)


def lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Long-tailed: a few rows are many times as long as the middle one."""
    drawn = np.random.default_rng(seed).lognormal(mean=4.6, sigma=0.9, size=count)
    return [*np.clip(drawn, 16, longest).astype(int).tolist()[:-1], longest]


def rows(vocabulary: int, of: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (n,), generator=generator) for n in of]


def packed(made: list[Tensor], **wants: Any) -> Packed:
    mask = torch.cat([torch.arange(len(row)) > 0 for row in made])
    return Packed(torch.cat(made), mask, tuple(len(row) for row in made), **wants)


def config(**learner: Any) -> Config:
    dtype = learner.pop("dtype", "float32")
    return Config.model_validate({"model": {"dtype": dtype}, "learner": learner})


def on_cpu(variant: str, steps: int) -> Found:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL))
    made = rows(SMALL["vocab_size"], lengths(ROWS, LONGEST))
    real = sum(len(row) for row in made)
    computed = real
    if variant == "padded":
        computed = ROWS * LONGEST
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        ids = torch.zeros(ROWS, LONGEST, dtype=torch.long)
        mask = torch.zeros(ROWS, LONGEST, dtype=torch.long)
        for i, row in enumerate(made):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1

        def step() -> float:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            log_p = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            loss = -(log_p * mask[:, 1:]).sum() / real
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())
    else:
        backend = TorchBackend(config(**LEARNER[variant]), model, device="cpu")
        chunked = variant != "packed"
        part = packed(made) if chunked else packed(made, wants=frozenset(("hidden",)))
        targets = part.token_ids[part.mask]

        def all_logits(_: int, scores: Scores) -> Tensor:
            assert scores.hidden is not None
            logits = scores.hidden @ model.get_output_embeddings().weight.t()
            return -logits.log_softmax(-1).gather(1, targets[:, None]).sum() / real

        def step() -> float:
            said: list[float] = []

            def loss(i: int, scores: Scores) -> Tensor:
                value = -scores.logprobs.sum() / real if chunked else all_logits(i, scores)
                said.append(float(value.detach()))
                return value

            backend.accumulate([part], loss)
            backend.clip(1.0)
            backend.apply(1e-6)
            return said[0]

    begun = time.process_time()
    first = step()  # AdamW's state is there from now on, and what is compiled
    first_s = time.process_time() - begun
    before = _peak(reset=True)
    begun = time.process_time()
    for _ in range(steps):
        step()
    seconds = (time.process_time() - begun) / steps
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "real_tokens": real,
        "computed_tokens": computed,
        "cpu_s": seconds,
        "first_step_cpu_s": first_s,
        "real_tokens_per_cpu_s": real / seconds,
        "peak_mib": _peak() - before,
        "loss": first,
    }


def on_gpu(length: int, steps: int, compiled: bool) -> Found:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**QWEN3_06B))
    by = "torch" if compiled else "fsdp2"
    asked = config(dtype="bfloat16", activation_checkpointing=True, backend=by, compile=compiled)
    backend = (TorchBackend if compiled else Fsdp2Backend)(asked, model.to("cpu"))
    part = packed(rows(QWEN3_06B["vocab_size"], [length]))

    def step() -> None:
        backend.accumulate([part], lambda _, scores: -scores.logprobs.sum() / length)
        backend.clip(1.0)
        backend.apply(1e-6)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / steps
    name = torch.cuda.get_device_name()
    peak = next((flops for known, flops in TFLOPS.items() if known in name), None)
    achieved = operations(QWEN3_06B, length) / seconds / 1e12
    return {
        "device": name,
        "tokens_per_s": length / seconds,
        "tflops": achieved,
        "mfu": None if peak is None else achieved / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def operations(size: dict[str, Any], length: int) -> float:
    """Of forward and backward over one row: six per weight and token, and causal attention."""
    h, heads, kv, d = (size[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    layer = h * d * (2 * heads + 2 * kv) + 3 * h * size["intermediate_size"]
    weights = size["num_hidden_layers"] * layer + size["vocab_size"] * h
    attention = size["num_hidden_layers"] * heads * d * length * length  # 2 products, 2 operations, half of the square
    return 6.0 * weights * length + 3.0 * 2.0 * attention


def shares() -> Found:
    """How 4096 rows of long-tailed lengths fill micro-batches of 16k tokens, over 8 ranks."""
    of = lengths(4096, 8192)
    parts = pack(of, 16384, 8)
    costs = [sum(row_cost(of[i]) for i in part) for part in parts]
    fill = sum(of) / (16384 * len(parts))
    padded = sum(of) / (max(of) * len(of))
    return {
        "real_token_share": 1.0,
        "padded_real_token_share": padded,
        "fill": fill,
        "mean_over_dearest_micro_batch": sum(costs) / len(costs) / max(costs),
    }


def would_run(steps: int, compiled: bool) -> str:
    lines = ["no CUDA GPU here; with one this would run, one process each, 1 step to warm up and then measured:"]
    for n in SEQUENCES:
        target = f", target {TARGETS[n]} tokens/s on an H100" if n in TARGETS else ""
        tera = operations(QWEN3_06B, n) / 1e12
        lines.append(f"  {steps} steps of one row of {n} tokens: {tera:.0f} TFLOP a step{target}")
    size = ", ".join(f"{k} {v}" for k, v in QWEN3_06B.items())
    how = f"learner.backend {'torch, compiled' if compiled else 'fsdp2'}, bfloat16, activation checkpointing"
    return "\n".join([*lines, f"{how}; Qwen3 with {size}"])


def cpu_table(found: dict[str, Found]) -> str:
    lines = [f"{'variant':<16} {'real tokens/CPU-s':>18} {'ratio':>6} {'peak MiB':>9} {'real share':>11} {'loss':>9}"]
    base = found["padded"]["real_tokens_per_cpu_s"]
    for name, x in found.items():
        share = x["real_tokens"] / x["computed_tokens"]
        rate = x["real_tokens_per_cpu_s"]
        lines.append(
            f"{name:<16} {rate:>18.0f} {rate / base:>6.2f} {x['peak_mib']:>9.0f} {share:>11.2f} {x['loss']:>9.5f}"
        )
    s = shares()
    if compiled := found.get("compiled"):
        anew = compiled["first_step_cpu_s"] - compiled["cpu_s"]
        lines.append(
            f"compiled: its first step took {anew:.0f} CPU seconds more, on top of what was compiled at the start"
        )
    return "\n".join(
        [
            *lines,
            f"4096 long-tailed rows, micro-batches of at most 16k tokens, 8 ranks: real tokens 1.00 of those computed "
            f"({s['padded_real_token_share']:.2f} padded), {s['fill']:.2f} of the allowed tokens used, "
            f"mean micro-batch costs {s['mean_over_dearest_micro_batch']:.2f} of the dearest",
        ]
    )


def gpu_table(found: dict[str, Found]) -> str:
    lines = [f"{'tokens a row':>12} {'tokens/s':>10} {'target':>8} {'MFU':>6} {'peak GiB':>9}"]
    for n, x in found.items():
        mfu = "-" if x["mfu"] is None else f"{x['mfu']:.2f}"
        target = TARGETS.get(int(n), "-")
        lines.append(f"{n:>12} {x['tokens_per_s']:>10.0f} {target:>8} {mfu:>6} {x['peak_gib']:>9.1f}")
    return "\n".join(lines)


def _in_a_process(cell: str, given: argparse.Namespace) -> Found:
    words = ["--preset", given.preset, "--steps", str(given.steps), "--threads", str(given.threads), "--cell", cell]
    words += ["--compile"] * given.compile
    done = subprocess.run(
        [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True, timeout=1800
    )
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def _peak(*, reset: bool = False) -> float:
    """MiB: the largest resident size since the last reset, or after a reset the present one (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    held = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert held is not None
    return int(held.group(1)) / 1024


if __name__ == "__main__":
    main()
