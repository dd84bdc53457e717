"""Supervised fine-tuning beside TRL's SFTTrainer: the same model, chats and update, on the CPU, in one go.

    asyncrl       `asyncrl launch` with learner.loss: sft: a buffer and a learner, rows packed, logits in chunks
    TRL           SFTTrainer with its defaults: rows padded to the longest of the batch, all logits

on two sets of chats with about 9M parameters:

    alike         the chats of examples/demonstrations.jsonl, as they are
    long tail     one to six of them in a row, most of them few

Both train on the same tokens (TRL gets the rows that asyncrl renders), float32, AdamW, 8 chats a step. Counted are
tokens that carry loss, by the clock, from the end of the warm-up to the last step; the two alternate. Needs the `bench`
extra, which may sit in another virtual environment (--trl-python). Prints a table, writes bench/results/sft.json, and
what there is so far to sft.part.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import torch
import transformers
import yaml
from results import finish, keep, processor
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config import Config
from asyncrl.data.demonstrations.chat import decoded, encoded
from asyncrl.model import QUICKSTART
from asyncrl.rendering.build import build_renderer
from asyncrl.rendering.demonstrations import rows_of
from learner import SMALL

ROOT = Path(__file__).parents[2]
CHATS = ROOT / "examples" / "demonstrations.jsonl"
PER_STEP, WARM_UP, LR = 8, 2, 1e-4
LIMIT_S = 300.0
MOST_IN_A_ROW = 6
SHAPES = SMALL | {"max_position_embeddings": 4096}
Chat = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help=f"measured, after {WARM_UP} that are not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "sft.json")
    args = parser.parse_args()
    remedy = "pip install -e '.[bench]', or name a Python that has them (--trl-python)"
    needs.packages("trl", "datasets", "accelerate", of="TRL", remedy=remedy, python=args.trl_python)

    work = ROOT / "bench" / "work" / "sft"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    parameters = a_model(work / "model")
    found: dict[str, Any] = {
        "machine": {"cpu": processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": parameters, "chats_per_step": PER_STEP, "threads": args.threads, "steps": args.steps,
        "chats": {}, "runs": {},
    }  # fmt: skip
    sets = {"alike": alike(), "long tail": long_tail()}
    for name, chats in sets.items():
        file = work / f"{name.replace(' ', '-')}.jsonl"
        file.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
        rows = rendered(work / "model", chats)
        file.with_suffix(".rows.json").write_text(json.dumps(rows))
        lengths = sorted(len(row["input_ids"]) for row in rows)
        found["chats"][name] = {
            "rows": len(rows), "mean": statistics.fmean(lengths), "median": statistics.median(lengths),
            "longest": lengths[-1], "with_loss": sum(sum(row["assistant_masks"]) for row in rows) / sum(lengths),
        }  # fmt: skip
        found["runs"][name] = {"asyncrl": [], "TRL": []}
    for _ in range(args.repeats):
        for name, runs in found["runs"].items():
            file = work / f"{name.replace(' ', '-')}.jsonl"
            ours = of_asyncrl(work, file, args.steps, args.threads)
            runs["asyncrl"].append(ours)
            theirs = of_trl(args.trl_python, work, file, args.steps, args.threads)
            found["versions"] |= {f"{key} of TRL": value for key, value in theirs.pop("versions").items()}
            runs["TRL"].append(theirs)
            found["machine"]["load"] = os.getloadavg()
            keep(args.out, found)
            print(f"{name}: asyncrl {rate(ours):.0f}, TRL {rate(theirs):.0f} tokens/s", flush=True)
    finish(args.out, found)
    show(found)
    print(f"\nwrote {args.out}")


def show(found: dict[str, Any]) -> None:
    print(f"\n{'trained tokens/s':12s}{'asyncrl':>28s}{'TRL SFTTrainer':>28s}{'ratio':>20s}")
    for name, runs in found["runs"].items():
        ours, theirs = ([rate(run) for run in runs[system]] for system in ("asyncrl", "TRL"))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        cells = "".join(f"{_spread(values, digits):>24s}" for values, digits in ((ours, 0), (theirs, 0), (ratios, 2)))
        print(f"{name:16s}{cells}")


def rate(run: dict[str, Any]) -> float:
    return float(run["tokens"] / run["seconds"])


def _spread(values: list[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def of_asyncrl(work: Path, chats: Path, steps: int, threads: int) -> dict[str, Any]:
    """Tokens with loss and seconds of the measured steps of one `asyncrl launch`."""
    shutil.rmtree(work / "runs", ignore_errors=True)
    total = WARM_UP + steps
    config = {
        "model": {"path": str(work / "model")},
        "data": {"demonstrations": str(chats)},
        "actors": {"count": 0},
        "learner": {
            "loss": "sft", "steps": total + 1, "lr": LR, "threads": threads, "checkpoint_every": 10_000,
            "demonstrations": {"per_step": PER_STEP}, "tokens_per_micro_batch": 32_768,
        },
        "weights": {"every": 10_000},
        "eval": {"tasks": 0},
    }  # fmt: skip
    (work / "sft.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "asyncrl", "launch", "--config", str(work / "sft.yaml"), "--launch.name", "run"]
    subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    records = [json.loads(line) for line in (work / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    by_step = {r["step"]: r for r in records if "weights/demonstrations/tokens" in r}
    # The last step's record may follow the last checkpoint, so that one step more is made.
    tokens = sum(by_step[step]["weights/demonstrations/tokens"] for step in range(WARM_UP + 1, total + 1))
    return {"tokens": tokens, "seconds": by_step[total]["wall_s"] - by_step[WARM_UP]["wall_s"]}


def of_trl(python: str, work: Path, chats: Path, steps: int, threads: int) -> dict[str, Any]:
    """The same of SFTTrainer, with its versions."""
    rows = chats.with_suffix(".rows.json")
    command = [
        python, str(ROOT / "scripts/bench/trl_sft.py"), "--model", str(work / "model"), "--rows", str(rows),
        "--per-step", str(PER_STEP), "--steps", str(WARM_UP + steps), "--warm-up", str(WARM_UP), "--lr", str(LR),
        "--threads", str(threads),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    result: dict[str, Any] = json.loads(next(x for x in done.stdout.splitlines() if x.startswith('{"versions"')))
    return result


def a_model(folder: Path) -> int:
    """Writes a model that was never trained, with the quickstart's tokenizer; its parameters."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPES))
    model.save_pretrained(folder)
    for file in QUICKSTART.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder / file.name)
    return sum(p.numel() for p in model.parameters())


def alike() -> list[Chat]:
    return [json.loads(line) for line in CHATS.read_text().splitlines()]


def long_tail() -> list[Chat]:
    """As many chats, each of n of those in a row; P(n) falls as 1 / n^2."""
    draw, chats = random.Random(0), alike()
    counts = range(1, MOST_IN_A_ROW + 1)
    made = []
    for n in draw.choices(counts, [1 / n**2 for n in counts], k=len(chats)):
        parts = draw.sample(chats, n)
        made.append({"messages": [m for part in parts for m in part["messages"]], "tools": parts[0]["tools"]})
    return made


def rendered(model: Path, chats: list[Chat]) -> list[dict[str, list[int]]]:
    """The rows that asyncrl trains on."""
    renderer = build_renderer(Config.model_validate({"model": {"path": str(model)}}))
    rows = [row for chat in chats for row in rows_of(renderer, decoded(encoded(chat, "a chat")), None)]
    return [{"input_ids": list(row.ids), "assistant_masks": [int(shown) for shown in row.mask]} for row in rows]


if __name__ == "__main__":
    main()
