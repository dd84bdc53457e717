"""Asynchronous against synchronous training on one GPU that generation and training share.

`configs/one-gpu.yaml` with a random model of Qwen3-0.6B's shape (no download) and a learning rate of 0, so that every
run sees the same lengths: about geometric, because some tokens of the vocabulary end an answer, cut at --longest.

    synchronous        `max_staleness: 0`: the two take turns, each with its own share of the memory
    asynchronous       `max_staleness: 2`

Alternating, --repeats of each; trajectories and tokens trained per second, after the first steps. The target is 1.35.
With a vLLM that does not name the version of a token (0.24) requests end before new weights (`weights.drain`), in both.
Prints a table, writes bench/results/one_gpu.json, and what there is so far to one_gpu.part.json. Without a GPU it
prints what it would run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from results import finish, keep

ROOT = Path(__file__).parents[2]
SETTLE = 4
"""Training steps at the start of a run that are not measured."""
TARGET = 1.35
VOCABULARY, FIRST_STOP = 151_936, 1_000
NEEDED = ("torch", "transformers", "vllm", "zmq", "msgpack", "xxhash", "pydantic", "tyro", "psutil", "rich", "httpx")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="training steps per run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--groups", type=int, default=16, help="of 8 trajectories, per step")
    parser.add_argument("--mean", type=int, default=300, help="tokens of an answer before it is cut")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--channel", default="cuda_ipc", help="weights.channel: cuda_ipc, or shm to compare with")
    parser.add_argument("--work", type=Path, default=ROOT / "bench" / "work" / "one_gpu")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "one_gpu.json")
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    commands = {name: command(args, name, staleness) for name, staleness in (("synchronous", 0), ("asynchronous", 2))}
    if why := cannot():
        print(f"Not run: {why}. On a machine with one GPU this would run, {args.repeats} times in turn:")
        for name, (words, config) in commands.items():
            print(f"\n{name}: {' '.join(words)}\n{yaml.safe_dump(config)}", end="")
        return
    random_model(args.work / "model")
    said = {"gpu": gpu(), "vllm": importlib.metadata.version("vllm"), "channel": args.channel, "steps": args.steps}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for repeat in range(args.repeats):
        for name, (words, config) in commands.items():
            rows[name].append(launched([*words, "--launch.name", f"{name}-{repeat}"], config, args.work))
            keep(args.out, said | {"rows": rows})
            print(f"[{repeat}] {name}: {rows[name][-1]}", flush=True)
    median = {name: statistics.median(row["tokens_per_s"] for row in found) for name, found in rows.items()}
    ratio = median["asynchronous"] / median["synchronous"]
    print("\n| | tokens trained per second, median | each |\n| --- | ---: | --- |")
    for name, found in rows.items():
        print(f"| {name} | {median[name]:.0f} | {', '.join(str(round(row['tokens_per_s'])) for row in found)} |")
    print(f"\nasynchronous / synchronous: {ratio:.2f} (target {TARGET})")
    finish(args.out, said | {"ratio": ratio, "rows": rows})


def cannot() -> str:
    """Why nothing can be measured here; empty: it can."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return f"{', '.join(missing)} cannot be imported"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def command(args: argparse.Namespace, name: str, staleness: int) -> tuple[list[str], dict[str, Any]]:
    """What is launched, and its config."""
    overlap = ROOT / "scripts" / "bench" / "overlap.py"
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "one-gpu.yaml").read_text())
    stops = list(range(FIRST_STOP, FIRST_STOP + VOCABULARY // args.mean))
    changes: dict[str, dict[str, Any]] = {
        "model": {"path": str(args.work / "model")},
        "env": {"name": f"{overlap}:Evenness", "options": {}, "max_tokens": args.longest + 512},
        "actors": {"max_new_tokens": args.longest, "slots": min(256, 8 * args.groups * (staleness + 1))},
        "weights": {"channel": args.channel, "drain": not names_versions()},
        "buffer": {"max_staleness": staleness, "filters": []},
        "learner": {"steps": args.steps, "groups_per_step": args.groups, "lr": 0.0, "warmup_steps": 0},
        "eval": {"tasks": 0},
        "launch": {"runs_dir": str(args.work / "runs"), "start_s": 600.0},
    }
    for section, values in changes.items():
        config[section] = config.get(section, {}) | values
    config["data"] = {"source": f"{overlap}:Questions"}
    config["learner"]["checkpoint_every"] = 10_000
    config["actors"]["stop_token_ids"] = stops
    path = args.work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    shown = config | {"actors": config["actors"] | {"stop_token_ids": f"{len(stops)} of {VOCABULARY}"}}
    return [sys.executable, "-m", "asyncrl", "launch", "--config", str(path)], shown


def names_versions() -> bool:
    """Of vLLM, if it is installed."""
    if importlib.util.find_spec("vllm") is None:
        return True
    major, minor, *_ = importlib.metadata.version("vllm").split(".")
    return (int(major), int(minor)) >= (0, 32)


def launched(words: list[str], config: dict[str, Any], work: Path) -> dict[str, float]:
    """After the first steps. Raises SystemExit with the end of what a run that failed said."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    run = work / "runs" / words[-1]
    if done.returncode:
        logs = "".join(f"\n== {log.name}\n{log.read_text()[-3000:]}" for log in sorted((run / "logs").glob("*.log")))
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}\n{done.stdout[-2000:]}{logs}")
    shutil.rmtree(run / "checkpoints")  # 7 GB each
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(r for r in records if r["step"] >= SETTLE)
    last = [r for r in records if r["step"] < config["learner"]["steps"]][-1]
    seconds = last["wall_s"] - first["wall_s"]
    batch = config["learner"]["groups_per_step"] * config["learner"]["group_size"]
    return {
        "trajectories_per_s": (last["step"] - first["step"]) * batch / seconds,
        "tokens_per_s": (last["tokens"] - first["tokens"]) / seconds,
        "step_s": seconds / (last["step"] - first["step"]),
    }


def random_model(folder: Path) -> None:
    """Qwen3-0.6B's shape, and a tokenizer of one character per token, whose other tokens no text leads to."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    ids = {chr(c): c - 32 for c in range(32, 127)} | {"<pad>": 95, "<eos>": 96}
    ids |= {f"<{n}>": n for n in range(97, VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<pad>")),
        pad_token="<pad>", eos_token="<eos>",
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=96, pad_token_id=95,
    )  # fmt: skip
    # Not on the GPU, all of which is for the runs.
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


def gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
