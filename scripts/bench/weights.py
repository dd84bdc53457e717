"""What it takes to bring a policy version from the learner to an actor, beside what it could be measured against.

    memory copy     every tensor copied once, into three places in turn, so that none is in the processor's cache
    shm             published (copied and hashed), then taken over: verified and copied into the model. Two copies' work
    raw socket      the same bytes over TCP on loopback, sendall to recv_into
    zmq             from the published file on one 'host' to the verified file on another: whole, and 1% changed;
                    over ipc, and over tcp with CURVE
    savings         bytes of a delta beside the whole file, at the learning rates that people use: of real runs of the
                    quickstart, and of a larger random model with real gradients (AdamW's first steps, its largest)

Seconds are the least of the repeats; CPU is that of this process (publisher, mirror, actor), the server's apart. Where
the process may use several cores, shm copies and verifies on all of them: its seconds may be fewer than its CPU. Prints
what docs/explanation/weights.md takes, as markdown; writes bench/results/weights.json. 600M parameters take 18 GB of
memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from results import finish, keep

from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.weights.channels import Shm
from asyncrl.weights.local.folder import File, Watch
from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber
from asyncrl.weights.network import delta
from asyncrl.weights.network.mirror import Mirror
from asyncrl.weights.network.server import WeightsServer
from asyncrl.weights.protocol import Publisher, WeightsVersion

ROOT = Path(__file__).parents[2]
LEARNING_RATES = (1e-3, 1e-4, 1e-5, 1e-6)
CHANGED = 0.01
WAIT_S = 300.0
Tensors = dict[str, torch.Tensor]
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, nargs="*", default=[10, 100, 600], help="parameters, bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="training steps of each run that savings are measured on")
    parser.add_argument("--large", type=int, default=1024, help="hidden size of the larger random model")
    parser.add_argument("--no-savings", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "weights.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: Found = {"machine": machine(), "transport": [], "savings": []}
    for millions in options.millions:
        row = transport(millions * 1_000_000, options.repeats)
        found["transport"].append(row)
        keep(options.out, found)
        print(describe(row), flush=True)
    if not options.no_savings:
        for source in (of_a_run, of_a_large_model):
            for dtype in ("float32", "bfloat16"):
                for lr in LEARNING_RATES:
                    row = source(lr, dtype, options.steps, options.large)
                    found["savings"].append(row)
                    keep(options.out, found)
                    print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    finish(options.out, found)
    print("\n" + markdown(found))


def model(parameters: int) -> Tensors:
    """Matrices of about the sizes of a transformer's of so many parameters."""
    side, left, made = 512 if parameters < 50_000_000 else 1024, parameters, {}
    generator = torch.Generator().manual_seed(0)
    while left > 0:
        rows = min(side * 4, max(1, left // side))
        made[f"w{len(made)}"] = torch.randn(rows, side, generator=generator).bfloat16()
        left -= rows * side
    return made


def transport(parameters: int, repeats: int) -> Found:
    source = model(parameters)
    targets = [{name: torch.empty_like(tensor) for name, tensor in source.items()} for _ in range(3)]
    target, turns = targets[0], itertools.count()
    size = sum(tensor.nbytes for tensor in source.values())

    def copy() -> None:
        into = targets[next(turns) % len(targets)]
        for name, tensor in source.items():
            into[name].copy_(tensor)

    for _ in targets:
        copy()
    row: Found = {"parameters": parameters, "bytes": size, "copy": least(copy, repeats)}
    with folder() as dir:
        publisher, subscriber = ShmPublisher(dir), ShmSubscriber(dir)
        versions = iter(range(10**6))

        def publish() -> None:
            publisher.publish(0, next(versions), source.items())

        def take() -> None:
            weights = subscriber.open()
            for name, tensor in weights.tensors():
                target[name].copy_(tensor)
            weights.close()

        for _ in range(3):  # every file of the folder is mapped once by both
            publish()
            take()
        publishing, taking = [], []
        for _ in range(repeats):
            publishing.append(timed(publish))
            taking.append(timed(take))
        row["shm_publish"] = tuple(map(min, zip(*publishing, strict=True)))
        row["shm_take"] = tuple(map(min, zip(*taking, strict=True)))
    targets.clear()
    target.clear()
    row["socket"] = least(lambda: over_a_socket(source), max(2, repeats // 2))
    for name, host in (("ipc", ""), ("curve", "127.0.0.1")):
        row |= {f"zmq_{name}_{kind}": times for kind, times in over_zmq(source, host, max(2, repeats // 2)).items()}
    row["shm_over_two_copies"] = (row["shm_publish"][0] + row["shm_take"][0]) / (2 * row["copy"][0])
    row["shm_over_two_copies_cpu"] = (row["shm_publish"][1] + row["shm_take"][1]) / (2 * row["copy"][1])
    return row


def over_a_socket(source: Tensors) -> None:
    """Into memory; both ends in this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    into = bytearray(1 << 20)

    def receive() -> None:
        connection, _ = listener.accept()
        with connection:
            while connection.recv_into(into):
                pass

    receiving = threading.Thread(target=receive)
    receiving.start()
    with socket.create_connection(listener.getsockname()) as sender:
        for tensor in source.values():
            sender.sendall(memoryview(tensor.view(torch.uint8).reshape(-1).numpy()))
    receiving.join(WAIT_S)
    listener.close()


def over_zmq(source: Tensors, host: str, repeats: int) -> dict[str, tuple[float, ...]]:
    """(seconds, CPU of this process, CPU of the server, bytes received) of a whole version and of one that changed."""
    config = Config.model_validate({"launch": {"host": host}})
    with folder() as work:
        run = RunFolder.create(work / "run", config)
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(run.path,), daemon=True)
        server.start()
        mirror = Mirror(run.shm / "mirror", run.address("weights"))
        publisher, watch = ShmPublisher(run.shm), Watch(mirror.dir)
        try:
            mirror.start()
            found: dict[str, list[tuple[float, ...]]] = {"full": [], "delta": []}
            for version in range(2 * repeats + 2):
                whole = version % 2 == 0
                for tensor in source.values():  # in place: the largest model should fit beside its versions
                    bits = tensor.view(torch.int16).reshape(-1)
                    bits[(version * 37) % 100 :: 1 if whole else round(1 / CHANGED)] ^= 1
                received = mirror.counts["received_bytes"]
                id = publisher.publish(0, version, source.items())
                process = psutil.Process(server.pid)
                began, cpu, theirs = time.perf_counter(), time.process_time(), sum(process.cpu_times()[:2])
                until(watch, id)
                times = time.perf_counter() - began, time.process_time() - cpu, sum(process.cpu_times()[:2]) - theirs
                if version > 1:
                    found["full" if whole else "delta"].append((*times, mirror.counts["received_bytes"] - received))
            return {kind: min(rows) for kind, rows in found.items()}
        finally:
            mirror.close()
            server.terminate()
            server.join(10)
            run.remove_temporary()


def serve(path: Path) -> None:
    run = RunFolder.existing(path)
    with closing(WeightsServer(run.shm, run.address("weights"), full_every=0)) as server:
        server.run(lambda: False, 1e9, lambda: None)


def until(watch: Watch, id: WeightsVersion) -> None:
    deadline = time.monotonic() + WAIT_S
    while watch.latest() != id:
        if time.monotonic() > deadline:
            raise TimeoutError(f"version {id} did not arrive within {WAIT_S:g} s")
        time.sleep(0.001)


class Measured(Shm):
    """A channel that notes, after each publication, what a delta of it has (`weights.channel`: this file:Measured)."""

    def publisher(self, run: RunFolder) -> Publisher:
        return MeasuringPublisher(ShmPublisher(run.shm), run.path / "deltas.jsonl")


class MeasuringPublisher:
    def __init__(self, publisher: ShmPublisher, notes: Path) -> None:
        self._publisher, self._notes = publisher, notes
        self._watch = Watch(publisher.dir)
        self._before: File | None = None

    def publish(self, branch: int, version: int, named: Any) -> WeightsVersion:
        id = self._publisher.publish(branch, version, named)
        now = self._watch.file(verify_bytes=False)
        if self._before is not None:
            began = time.process_time()
            made = delta.make(self._before.map, self._before.entries, now.map, now.entries)
            assert made is not None
            cpu = time.process_time() - began
            note = {"version": version, "bytes": len(now.map), "delta": len(made), "share": share(self._before, now)}
            with self._notes.open("a") as file:
                file.write(json.dumps(note | {"cpu_s": cpu}) + "\n")
            self._before.close()
        self._before = now
        return id

    def latest(self) -> WeightsVersion | None:
        return self._publisher.latest()

    def pin(self, version: tuple[int, int]) -> bool:
        return self._publisher.pin(version)

    def unpin(self) -> None:
        self._publisher.unpin()


def share(a: File, b: File) -> float:
    """Of the elements, those that changed."""
    changed = total = 0
    for entry in b.entries:
        before, after = delta._elements(a.map, entry), delta._elements(b.map, entry)
        changed, total = changed + int((before != after).sum()), total + len(after)
    return changed / total


def of_a_run(lr: float, dtype: str, steps: int, _: int) -> Found:
    """The quickstart, really trained."""
    with folder() as work:
        fields = {
            "learner.lr": lr, "model.dtype": dtype, "learner.steps": steps, "eval.tasks": 0, "launch.runs-dir": work,
            "launch.name": "run", "weights.channel": f"{Path(__file__).resolve()}:Measured",
        }  # fmt: skip
        words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "asyncrl", "launch", "--config", "configs/quickstart.yaml", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}")
        notes = [json.loads(line) for line in (work / "run" / "deltas.jsonl").read_text().splitlines()]
    return summed("quickstart", lr, dtype, notes)


def of_a_large_model(lr: float, dtype: str, steps: int, hidden: int) -> Found:
    """Random weights as they are initialised, real gradients of a language model's loss on random tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=6,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    policy = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    with folder() as work:
        publisher = MeasuringPublisher(ShmPublisher(work / "w"), work / "deltas.jsonl")
        for version in range(steps + 1):
            kind = getattr(torch, dtype)
            publisher.publish(0, version, ((n, p.detach().to(kind)) for n, p in policy.named_parameters()))
            tokens = torch.randint(0, 8192, (4, 64))
            policy(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        notes = [json.loads(line) for line in (work / "deltas.jsonl").read_text().splitlines()]
    return summed(f"random, {sum(p.numel() for p in policy.parameters()) / 1e6:.0f}M", lr, dtype, notes)


def summed(name: str, lr: float, dtype: str, notes: list[dict[str, float]]) -> Found:
    return {
        "model": name,
        "lr": lr,
        "dtype": dtype,
        "publications": len(notes),
        "bytes": int(notes[0]["bytes"]),
        "delta_bytes": statistics.mean(n["delta"] for n in notes),
        "changed": statistics.mean(n["share"] for n in notes),
        "times_fewer": sum(n["bytes"] for n in notes) / sum(n["delta"] for n in notes),
        "least": min(n["bytes"] / n["delta"] for n in notes),
        "cpu_s": statistics.mean(n["cpu_s"] for n in notes),
    }


def timed(what: Callable[[], None]) -> tuple[float, float]:
    """(seconds, seconds of CPU)"""
    wall, cpu = time.perf_counter(), time.process_time()
    what()
    return time.perf_counter() - wall, time.process_time() - cpu


def least(what: Callable[[], None], repeats: int) -> tuple[float, float]:
    found = [timed(what) for _ in range(repeats + 1)][1:]
    return min(wall for wall, _ in found), min(cpu for _, cpu in found)


@contextmanager
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="asyncrl-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def describe(row: Found) -> str:
    base, socket_s = row["copy"][0], row["socket"][0]
    lines = [f"{row['parameters'] / 1e6:.0f}M parameters, {row['bytes'] / 1e6:.0f} MB"]
    for name, times in row.items():
        if isinstance(times, tuple):
            extra = f"  server's CPU {times[2]:.3f} s, {times[3] / 1e6:.1f} MB" if len(times) > 2 else ""
            ratio = f"{times[0] / base:5.1f} copies, {times[0] / socket_s:5.2f} sockets"
            lines.append(f"  {name:16} {times[0]:8.4f} s  CPU {times[1]:8.4f} s  {ratio}{extra}")
    both = row["shm_over_two_copies"], row["shm_over_two_copies_cpu"]
    lines.append(f"  shm over two copies: {both[0]:.2f} (CPU {both[1]:.2f}; at most 1.5 is the target)")
    return "\n".join(lines)


NAMES = {
    "copy": "memory copy", "shm_publish": "shm, published", "shm_take": "shm, taken over (verified, copied)",
    "socket": "raw TCP socket on loopback",
    "zmq_ipc_full": "zmq over ipc, whole", "zmq_ipc_delta": "zmq over ipc, 1% changed",
    "zmq_curve_full": "zmq over tcp with CURVE, whole", "zmq_curve_delta": "zmq over tcp with CURVE, 1% changed",
}  # fmt: skip


def markdown(found: Found) -> str:
    """What docs/explanation/weights.md takes."""
    lines = [found["machine"]]
    for row in found["transport"]:
        lines += [
            f"\n{row['parameters'] / 1e6:.0f}M parameters in bfloat16, {row['bytes'] / 1e6:.0f} MB; shm over two "
            f"copies: {row['shm_over_two_copies']:.2f} (CPU {row['shm_over_two_copies_cpu']:.2f})\n",
            "| | seconds | copies | sockets | CPU s | the server's CPU s | MB received |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for key, name in NAMES.items():
            times = row[key]
            server, received = (f"{times[2]:.3f}", f"{times[3] / 1e6:.1f}") if len(times) > 2 else ("", "")
            ratios = f"{times[0] / row['copy'][0]:.2f} | {times[0] / row['socket'][0]:.2f}"
            lines.append(f"| {name} | {times[0]:.4f} | {ratios} | {times[1]:.4f} | {server} | {received} |")
    if found["savings"]:
        lines += [
            "\n| model | learning rate | dtype | elements that changed | times fewer bytes than the file | least |",
            "| --- | ---: | --- | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {r['model']} | {r['lr']:.0e} | {r['dtype']} | {r['changed']:.1%} | {r['times_fewer']:.3g} | "
            f"{r['least']:.3g} |"
            for r in found["savings"]
        ]
    return "\n".join(lines)


def machine() -> str:
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
