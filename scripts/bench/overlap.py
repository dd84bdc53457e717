"""How much of generation and training overlaps: asynchronous against each part alone, and against taking turns.

In one go, on the quickstart's task with a learning rate of 0 (so that every run sees the same lengths), with tools that
answer at once and with tools of long-tailed latency:

    generation alone   buffer and actor, the actor on its core; trajectories stored per second
    training alone     the learner on its core, over what was just generated
    synchronous        `max_staleness: 0`, both cores for each phase
    asynchronous       `max_staleness: 2`, one core each

and, single-turn, TRL's GRPOTrainer with the same model, group size and lengths (needs the `bench` extra, which may
sit in another virtual environment: --trl-python; --no-trl leaves it out). Prints tables, writes
bench/results/overlap.json, and what there is so far to overlap.part.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import yaml

from asyncrl.buffer.client import BufferClient
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SETTLE = 4
"""Training steps at the start of a run that are not measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="training steps per run")
    parser.add_argument("--latency", nargs="*", default=["0", "lognormal:0.3,1.0"], help="env.options.tool_latency_s")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "overlap.json")
    args = parser.parse_args()
    # Here and not above: this file is also a plugin of the runs that it measures, which do not know its neighbours.
    import needs
    from results import finish, keep, processor

    needs.program("taskset", of="overlap.py", remedy="install util-linux")
    if not args.no_trl:
        remedy = (
            "pip install -e '.[bench]', name a Python that has them (--trl-python), or leave the row out (--no-trl)"
        )
        needs.packages("trl", "datasets", "accelerate", of="the row of TRL", remedy=remedy, python=args.trl_python)

    results: dict[str, list[dict[str, float]]] = {}
    machine = {"cpu": processor(), "cores": os.cpu_count(), "python": platform.python_version()}

    def found() -> dict[str, object]:
        return {"machine": machine | {"load": os.getloadavg()}, "steps": args.steps, "results": results}

    for repeat in range(args.repeats):
        for latency in args.latency:
            row = overlap(latency, args.steps)
            results.setdefault(f"tool latency {latency}", []).append(row)
            keep(args.out, found())
            print(f"[{repeat}] tool latency {latency}: {_short(row)}", flush=True)
        if not args.no_trl:
            row = against_trl(args.trl_python, args.steps)
            results.setdefault("single-turn, beside TRL", []).append(row)
            keep(args.out, found())
            print(f"[{repeat}] single-turn: {_short(row)}", flush=True)
    finish(args.out, found())
    for name, rows in results.items():
        print(f"\n{name} (median of {len(rows)}; lowest - highest)")
        for key in rows[0]:
            values = [row[key] for row in rows]
            print(f"  {key:34s} {statistics.median(values):10.3f}   {min(values):.3f} - {max(values):.3f}")
    print(f"\nwrote {args.out}")


def overlap(latency: str, steps: int) -> dict[str, float]:
    """Trajectories per second in the four arrangements, and the ratios asked of them."""
    options = {} if latency == "0" else {"tool_latency_s": latency}
    changes = {"env": {"options": options}}
    generation, training = alone(changes, steps)
    synchronous = launched(changes | {"buffer": {"max_staleness": 0}, **_threads(2)}, steps)
    asynchronous = launched(changes | {"buffer": {"max_staleness": 2}, **PINNED}, steps)
    return {
        "generation alone [traj/s]": generation,
        "training alone [traj/s]": training,
        "synchronous [traj/s]": synchronous["trajectories_per_s"],
        "asynchronous [traj/s]": asynchronous["trajectories_per_s"],
        "asynchronous [trained tokens/s]": asynchronous["tokens_per_s"],
        "async / min(alone)": asynchronous["trajectories_per_s"] / min(generation, training),
        "async / sync": asynchronous["trajectories_per_s"] / synchronous["trajectories_per_s"],
    }


def against_trl(python: str, steps: int) -> dict[str, float]:
    """Single-turn, 8 groups of 8, 32 new tokens: ours end to end, and TRL's trainer, with the same random model."""
    work = _work("trl")
    model, prompts = work / "model", work / "prompts.json"
    _random_model(model)
    prompts.write_text(json.dumps([f"question {i}: what is {i} + {i * 7 % 13}?" for i in range(400)]))
    ours = launched(
        {
            "model": {"path": str(model)},
            "data": {"source": f"{__file__}:Questions"},
            "env": {"name": f"{__file__}:Evenness", "max_turns": 1, "max_tokens": 160},
            "actors": {"max_new_tokens": 32, "slots": 64},
            "learner": {"groups_per_step": 8, "group_size": 8},
            "buffer": {"max_staleness": 2, "capacity": 512},
        }
        | {"launch": PINNED["launch"]},
        4 * steps,
    )
    command = [python, str(ROOT / "scripts/bench/trl_grpo.py"), "--model", str(model), "--prompts", str(prompts)]
    output = subprocess.run([*command, "--steps", str(steps)], check=True, capture_output=True, text=True, timeout=600)
    theirs = json.loads(next(line for line in output.stdout.splitlines() if line.startswith('{"trl"')))
    return {
        "asyncrl [tokens/s]": ours["tokens_per_s"],
        "TRL GRPOTrainer [tokens/s]": theirs["tokens_per_s"],
        "asyncrl / TRL": ours["tokens_per_s"] / theirs["tokens_per_s"],
    }


ONE_ACTOR = {"count": 1, "slots": 96}
"""As many in all arrangements, whatever configs/quickstart.yaml has: *alone* is one actor, too."""
PINNED = {"launch": {"cpus": {"actor": [0], "learner": [1], "buffer": [1]}}}


def _threads(n: int) -> dict[str, dict[str, int]]:
    return {"actors": {"threads": n}, "learner": {"threads": n}}


def launched(changes: dict, steps: int) -> dict[str, float]:
    """One `asyncrl launch`: trajectories and policy tokens trained per second, after the first steps."""
    work = _work("launched")
    config = _config(work, changes, steps)
    asyncrl = [sys.executable, "-m", "asyncrl", "launch", "--config", str(config), "--launch.name", "run"]
    subprocess.run(asyncrl, cwd=work, check=True, stdout=subprocess.DEVNULL, timeout=900)
    records = [json.loads(line) for line in (work / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(r for r in records if r["step"] >= SETTLE)
    # The last step's record may follow the evaluation and the checkpoint; the one before it does not.
    last = [r for r in records if r["step"] < steps][-1]
    seconds, batch = last["wall_s"] - first["wall_s"], _batch(config)
    return {
        "trajectories_per_s": (last["step"] - first["step"]) * batch / seconds,
        "tokens_per_s": (last["tokens"] - first["tokens"]) / seconds,
    }


def alone(changes: dict, steps: int) -> tuple[float, float]:
    """Generation with nobody training, then training on what was generated with nobody generating."""
    work = _work("alone")
    wide = {"buffer": {"max_staleness": 10 * steps, "capacity": 1_000_000}}
    path = _config(work, changes | wide, steps)
    config = Config.model_validate(yaml.safe_load(path.read_text()))
    run = RunFolder.create(work / "runs" / "run", config)
    batch, size = _batch(path), config.learner.group_size
    wanted = steps * batch
    with (
        role("buffer", run),
        closing(BufferClient(run.address("buffer"), identity="bench", deadline_s=60)) as client,
    ):
        with role("learner", run, cpu=1):
            # It publishes version 0 and then waits for the first batch, which is what an actor needs to start.
            _until(lambda: client.status()["published"] is not None, 120)
        with role("actors", run, "--name", "actor-0", cpu=0):
            generation = _rate(lambda: _complete(client) * size, wanted // 6, wanted)
        with role("learner", run, "--resume", cpu=1):
            training = _rate(lambda: client.status()["version"] * batch, SETTLE * batch, wanted)
    return generation, training


@contextmanager
def role(module: str, run: RunFolder, *arguments: str, cpu: int | None = None) -> Iterator[None]:
    """One process of the run, stopped in order at the end."""
    pin = [] if cpu is None else ["taskset", "-c", str(cpu)]
    command = [*pin, sys.executable, "-m", f"asyncrl.{module}", str(run.path), *arguments]
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with run.log(f"bench-{module}").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | threads)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _rate(count, low: int, high: int, limit_s: float = 600.0) -> float:
    """Per second, from the moment `count()` passes `low` until it reaches `high`."""
    _until(lambda: count() >= low, limit_s)
    began, at = count(), time.perf_counter()
    _until(lambda: count() >= high, limit_s)
    return (count() - began) / (time.perf_counter() - at)


def _until(done, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came within {limit_s:g} s: see the logs under {ROOT / 'bench' / 'work'}")
        time.sleep(0.05)


def _complete(client: BufferClient) -> int:
    """Groups of which every trajectory is there."""
    branch = client.status()["equation"]["0"]
    return sum(branch.get(state, 0) for state in ("waiting", "assigned", "trained"))


def _config(work: Path, changes: dict, steps: int) -> Path:
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    fixed = {"learner": {"steps": steps, "lr": 0.0, "checkpoint_every": 10_000}, "eval": {"tasks": 0}}
    for part in ({"actors": ONE_ACTOR}, changes, fixed):
        for section, values in part.items():
            config[section] = config.get(section, {}) | values
    path = work / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _batch(config: Path) -> int:
    learner = yaml.safe_load(config.read_text())["learner"]
    return int(learner["groups_per_step"] * learner["group_size"])


def _work(name: str) -> Path:
    folder = ROOT / "bench" / "work" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _random_model(folder: Path) -> None:
    """About 0.8M parameters, one token per character, never trained: it hardly ever ends a turn before 32 tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    ids = {chr(c): c - 32 for c in range(32, 127)} | {"<pad>": 95, "<eos>": 96}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=96,
        pad_token_id=95,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


class Questions:
    """The prompts that TRL gets, as a task source."""

    train_size = 400
    held_out_size = 0

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def task(self, index: int) -> dict:
        return {"id": str(index), "prompt": f"question {index}: what is {index} + {index * 7 % 13}?"}

    def held_out(self, index: int) -> dict:
        return self.task(index)


class Evenness:
    """The reward that TRL gets, or as near as text allows: the share of characters with an even code."""

    tools = ()

    async def reset(self, task) -> list[dict]:
        return [{"role": "user", "content": task["prompt"]}]

    async def step(self, message):
        from asyncrl.actors.envs.protocol import Turn

        text = message["content"]
        return Turn(reward=sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1), done=True)

    async def close(self) -> None: ...


def _short(row: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:.2f}" for key, value in row.items())


if __name__ == "__main__":
    main()
