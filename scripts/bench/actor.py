"""What the actor takes from its engine: tokens a second of bare vLLM and through the whole actor, in one go.

    actor      the real actor process with real vLLM, the real buffer process, one ticket after the other: episodes,
               capture, wire, commit. Single-turn (answers of one length) and with tools (latency 0, quickstart)
    bare       vLLM's own offline `LLM.generate` over exactly the calls that the actor made: the same prompts, the same
               number of tokens; without logprobs, and with `logprobs=0`
    pauses     one engine, vLLM and hf, kept full, new weights between two tokens: how long generation stands still,
               `recompute` and `reuse`, at short and at 1k contexts, and the share of the time at cadence 1, 4, 16

The actor and the bare engine run on core 0 with all their processes (`--cores`), the buffer on core 1. On one core
everything that the actor adds takes time from the engine; on two, front end and engine core work side by side, as they
do beside a GPU. Every cell is a process of its own; those that stand in the results already are not run again
(`--again` does). Needs vLLM: run it in its environment. Prints a table, writes bench/results/actor.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import needs
import numpy as np
import psutil
import torch
import yaml
from results import processor

from asyncrl.actors.engines.protocol import Engine, Sampling
from asyncrl.actors.engines.vllm.settings import VLLMSettings, engine_arguments, engine_environment
from asyncrl.buffer.client import BufferClient
from asyncrl.config import Config, ModelConfig
from asyncrl.model import load_model, resolve_path
from asyncrl.run_folder import RunFolder
from asyncrl.trajectory import Trajectory
from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber

ROOT = Path(__file__).parents[2]
SLOTS, GROUP = 96, 8
NEVER = 0
"""A token id that ends no answer; see `KINDS`."""
EPISODES_PER_STEP = 192
"""Of the quickstart: what one training step consumes."""
REQUESTS = 40 * SLOTS
"""Of the bare engine; the actor's calls, from the first on again where it made fewer."""
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    # One answer of 96 tokens, whatever is in it: only the pad token, which the model hardly samples, ends it.
    "single-turn": {"actors": {"stop_token_ids": [NEVER], "max_new_tokens": 96}, "env": {"max_turns": 1}},
    "tools": {},
}
CONTEXTS = {"short": None, "long": (1024, 128), "hf": None}
"""Tokens of the prompt and of the answer; None: the calls of the quickstart, as the actor made them. hf: the embedded
engine, with those."""
STEP_CALLS = {"short": 4 * EPISODES_PER_STEP, "long": EPISODES_PER_STEP, "hf": 4 * EPISODES_PER_STEP}
"""Calls of the engine that one training step consumes."""
CADENCES = (1, 4, 16)
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=12.0, help="that the actor is measured for")
    parser.add_argument("--cores", default="0", help="of the actor, and of the bare engine; as taskset has it")
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, "pauses"), default=(*KINDS, "pauses"))
    parser.add_argument("--again", action="store_true", help="forget the results that are there")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "actor.json")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    alone = args.cell is None and "pauses" in args.kinds and "tools" not in args.kinds
    if alone and not (calls := _calls_file("tools")).exists():
        parser.error(f"pauses plays the calls of the kind tools again, and {calls} is not there: name both kinds")
    if args.cell:
        print(json.dumps(pauses(args.cell) if args.calls is None else bare(args.calls, args.cell == "logprobs")))
        return
    remedy = "run it in vLLM's environment (`make test-vllm` makes .venv-vllm)"
    needs.packages("vllm", of="actor.py", remedy=remedy)
    needs.program("taskset", of="actor.py", remedy="install util-linux")
    found: Found = {"cells": {}}
    if args.out.exists() and not args.again:
        found = json.loads(args.out.read_text())

    def cell(name: str, measure: Any) -> None:
        if name in found["cells"]:
            return
        began = time.perf_counter()
        found["cells"][name] = measure() | {"load": round(os.getloadavg()[0], 1)}
        found["machine"] = {"cores": os.cpu_count(), "cpu": processor(), "python": platform.python_version()}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name} ({time.perf_counter() - began:.0f} s): {found['cells'][name]}", flush=True)

    for repeat in range(args.repeats):
        for kind in (kind for kind in KINDS if kind in args.kinds):
            calls = _calls_file(kind)
            cell(f"{kind}/actor/{repeat}", lambda kind=kind, calls=calls: whole(kind, args.seconds, args.cores, calls))
            for how in ("plain", "logprobs"):
                cell(
                    f"{kind}/bare {how}/{repeat}",
                    lambda how=how, calls=calls: _cell(how, args.cores, "--calls", str(calls)),
                )
        for context in CONTEXTS if "pauses" in args.kinds else ():
            cell(f"pauses/{context}/{repeat}", lambda context=context: _cell(context, args.cores))
    found["summary"] = summary(found["cells"])
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["summary"], indent=1))


def summary(cells: Found) -> Found:
    """Medians over the repeats, and the ratios that they give."""
    values: dict[str, dict[str, list[float]]] = {}
    for name, numbers in cells.items():
        for key, value in numbers.items():
            values.setdefault(name.rsplit("/", 1)[0], {}).setdefault(key, []).append(value)
    of = {name: {key: round(statistics.median(v), 4) for key, v in parts.items()} for name, parts in values.items()}
    for kind in (kind for kind in KINDS if f"{kind}/actor" in of):
        actor = of[f"{kind}/actor"]
        for how in ("plain", "logprobs"):
            actor[f"of bare {how}"] = round(actor["tokens_per_s"] / of[f"{kind}/bare {how}"]["tokens_per_s"], 3)
            actor[f"cpu of bare {how}"] = round(actor["cpu_us"] / of[f"{kind}/bare {how}"]["cpu_us"], 3)
    return of


def _calls_file(kind: str) -> Path:
    return ROOT / "bench" / "work" / f"calls-{kind}.json"


# The whole actor.


def whole(kind: str, seconds: float, cores: str, calls: Path) -> Found:
    """Tokens per second that arrive in the buffer; writes what was asked of the engine to `calls`."""
    folder = ROOT / "bench" / "work" / "actor"
    shutil.rmtree(folder, ignore_errors=True)
    config = Config.model_validate(_config(kind))
    run = RunFolder.create(folder, config)
    with (
        _role("buffer", run, "1"),
        closing(BufferClient(run.address("buffer"), identity="bench", deadline_s=60)) as client,
    ):
        begun = client.start(0, 0, None)
        sent = ShmPublisher(run.shm).publish(begun.branch, 0, load_model(config.model).named_parameters())
        client.published(begun.incarnation, begun.branch, 0, sent.digest)
        with _role("actors", run, cores, "--name", "actor-0") as actor:
            _until(lambda: _complete(client) >= 2 * SLOTS // GROUP)
            groups, at, cpu = _complete(client), time.perf_counter(), _cpu_s(actor)
            time.sleep(seconds)
            groups, at, cpu = _complete(client) - groups, time.perf_counter() - at, _cpu_s(actor) - cpu
        played: list[Trajectory] = []
        for b in range(min(groups, 400)):
            played += client.batch(begun.incarnation, b, 0, 1, 5.0).trajectories
            client.finished(begun.incarnation, b, "applied")
    run.remove_temporary()
    asked = [call for t in played for row in t.rows for call in _calls(row.token_ids, row.mask)]
    calls.write_text(json.dumps(asked))
    tokens = groups * GROUP * statistics.fmean(t.num_policy_tokens for t in played)
    return {
        "tokens_per_s": tokens / at,
        "cpu_us": 1e6 * cpu / tokens,
        "answer": statistics.fmean(n for _, n in asked),
        "prompt": statistics.fmean(len(prompt) for prompt, _ in asked),
    }


def _config(kind: str) -> Found:
    config: Found = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    common: dict[str, dict[str, Any]] = {
        "actors": {"engine": "vllm", "slots": SLOTS},
        "learner": {"steps": 100_000, "groups_per_step": 1, "group_size": GROUP},
        "buffer": {"max_staleness": 100_000, "capacity": 1_000_000, "keep": "all"},
        "eval": {"tasks": 0},
    }
    for part in (common, KINDS[kind]):
        for section, values in part.items():
            config[section] = config.get(section, {}) | values
    return config


def _calls(ids: np.ndarray, mask: np.ndarray) -> Iterator[tuple[list[int], int]]:
    """(prompt, tokens of the answer) of every call that made a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    for start, end in edges.reshape(-1, 2):
        yield ids[:start].tolist(), int(end - start)


@contextmanager
def _role(module: str, run: RunFolder, cores: str, *arguments: str) -> Iterator[psutil.Process]:
    command = ["taskset", "-c", cores, sys.executable, "-m", f"asyncrl.{module}", str(run.path), *arguments]
    with run.log(module).open("ab") as log:
        process = psutil.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except psutil.TimeoutExpired:
            process.kill()


def _cpu_s(process: psutil.Process) -> float:
    """Of it and its children: vLLM's core is one."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def _complete(client: BufferClient) -> int:
    branch = client.status()["equation"]["0"]
    return sum(branch.get(state, 0) for state in ("waiting", "assigned", "trained"))


def _until(done: Any, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came within {limit_s:g} s: see the logs under {ROOT / 'bench' / 'work'}")
        time.sleep(0.05)


# The bare engine.


def _cell(name: str, cores: str, *more: str) -> Found:
    command = ["taskset", "-c", cores, sys.executable, __file__, "--cell", name, *more]
    work = ROOT / "bench" / "work"
    work.mkdir(parents=True, exist_ok=True)
    with (work / "actor-cells.log").open("ab") as log:
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=log, text=True, timeout=300).stdout
    result: Found = json.loads(said.strip().splitlines()[-1])
    return result


def _settings(max_tokens: int) -> VLLMSettings:
    return VLLMSettings(resolve_path(Config().model), "float32", slots=SLOTS, max_tokens=max_tokens)


def bare(calls: Path, logprobs: bool) -> Found:
    """vLLM's `LLM.generate`, with the actor's settings for it."""
    settings = _settings(256)
    os.environ.update(engine_environment(settings, cpu=True))
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = engine_arguments(settings, cpu=True)
    for name in ("worker_extension_cls", "enable_log_requests"):
        del arguments[name]
    llm = LLM(**arguments)

    def params(n: int) -> Any:
        return SamplingParams(
            max_tokens=n,
            temperature=1.0,
            ignore_eos=True,
            logprobs=0 if logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    asked = json.loads(calls.read_text())

    def generate(part: list[Any]) -> int:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in part]
        outs = llm.generate(prompts, [params(n) for _, n in part], use_tqdm=False)
        return sum(len(out.outputs[0].token_ids) for out in outs)

    generate(asked[: 2 * SLOTS])
    me = psutil.Process()
    # A whole number of waves, and many, so that few slots idle at the end.
    number = REQUESTS if statistics.fmean(n for _, n in asked) < 20 else REQUESTS // 4
    asked = (asked * (REQUESTS // len(asked) + 1))[:number]
    cpu, at = _cpu_s(me), time.perf_counter()
    tokens = generate(asked)
    at, cpu = time.perf_counter() - at, _cpu_s(me) - cpu
    return {"tokens_per_s": tokens / at, "cpu_us": 1e6 * cpu / tokens, "requests": len(asked)}


# New weights.


def pauses(context: str) -> Found:
    if (lengths := CONTEXTS[context]) is None:
        calls = json.loads(_calls_file("tools").read_text())
    else:
        rng, (prompt, answer) = np.random.default_rng(0), lengths
        calls = [(rng.integers(2, 200, prompt).tolist(), answer) for _ in range(10 * SLOTS)]
    return asyncio.run(_pauses(calls, STEP_CALLS[context], context == "hf"))


async def _pauses(calls: list[tuple[list[int], int]], step_calls: int, hf: bool) -> Found:
    config = Config()
    model = load_model(config.model)
    # The positions of the quickstart's model end before: as long rows are computed all the same.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        model.config.max_position_embeddings = 2048
        model.save_pretrained(folder)
        most = max(len(prompt) + n for prompt, n in calls) + 1
        engine = _engine(Path(folder), most, hf)
        await engine.start()
        publisher = ShmPublisher(Path(folder) / "weights")
        try:
            return await _updated(engine, publisher, model, calls, step_calls)
        finally:
            await engine.close()


def _engine(folder: Path, most: int, hf: bool) -> Engine:
    if hf:
        from asyncrl.actors.engines.hf.engine import HFEngine

        torch.set_num_threads(1)
        return HFEngine(load_model(ModelConfig(path=str(folder))), slots=SLOTS, max_tokens=most)
    from asyncrl.actors.engines.vllm.engine import VLLMEngine

    return VLLMEngine(VLLMSettings(folder, "float32", slots=SLOTS, max_tokens=most))


async def _updated(
    engine: Engine, publisher: ShmPublisher, model: Any, calls: list[tuple[list[int], int]], step_calls: int
) -> Found:
    answer = statistics.fmean(n for _, n in calls)
    stop = asyncio.Event()

    async def slot(number: int) -> None:
        turn = 0
        while not stop.is_set():
            ids, n = calls[(turn * SLOTS + number) % len(calls)]
            # The first answers are of different lengths, so that slots do not end together ever after.
            n = n if turn else 1 + number * n // SLOTS
            await engine.generate(f"{number}.{turn}", ids, Sampling(n, 1.0, (), number))
            turn += 1

    def generated() -> float:
        return engine.load_stats()["generated"]

    async def reached(count: float) -> float:
        while generated() < count:  # noqa: ASYNC110
            await asyncio.sleep(0.0005)
        return time.perf_counter()

    slots = [asyncio.ensure_future(slot(i)) for i in range(SLOTS)]
    begun = generated()
    await reached(begun + SLOTS * answer * 1.5)
    first, at = generated(), time.perf_counter()
    await asyncio.sleep(6.0)
    rate = (generated() - first) / (time.perf_counter() - at)
    step_s = step_calls * answer / rate
    found: Found = {"tokens_per_s": rate, "step_s": step_s}
    for version, kv in enumerate(("recompute", "reuse") * 5, 1):
        publisher.publish(0, version, model.named_parameters())
        weights = ShmSubscriber(publisher.dir).open()
        await engine.check(weights)
        before, at = generated(), time.perf_counter()
        await engine.pause(kv == "recompute")
        await engine.load(weights)
        await engine.resume()
        weights.close()
        paused = time.perf_counter() - at
        # Until every running request has one token more, less what the tokens that came by then take anyway: also the
        # prefill that a recomputation costs counts as standing still.
        lost = await reached(max(before, generated()) + SLOTS) - at
        lost -= (generated() - before) / rate
        found.setdefault(f"{kv}_paused_s", []).append(paused)
        found.setdefault(f"{kv}_still_s", []).append(max(lost, paused))
        await reached(generated() + max(SLOTS * answer / 4, rate / 4))
    stop.set()
    await asyncio.gather(*slots)
    for name in [name for name in found if isinstance(found[name], list)]:
        found[name] = statistics.median(found[name])
    for kv in ("recompute", "reuse"):
        for cadence in CADENCES:
            still = found[f"{kv}_still_s"]
            found[f"{kv} share at cadence {cadence}"] = still / (still + cadence * step_s)
    return found


if __name__ == "__main__":
    main()
