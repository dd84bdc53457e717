"""What it takes the learner to bring a version to 1, 2 and 4 engines over process groups (`weights.channel: nccl`).

    alone      each engine by the group that it has with the learner, as before there was a group of several
    together   one broadcast in a group of all engines, which ask at the same time

Engines are processes of this host that copy the tensors and compare checksums; the group is gloo's, on the CPU, over
loopback. Seconds are from the end of a publication until every engine has the version: the least and the median of the
repeats. Bytes are those that the other ends of the learner's TCP sockets have acknowledged, read from the kernel.
gloo's broadcast is a binomial tree: with n engines the first process sends ceil(log2(n + 1)) copies. NCCL's is a ring,
in which it sends one; it is not run here. Writes bench/results/weights_broadcast.json.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import socket
import statistics
import struct
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from results import finish, keep

from asyncrl.weights.device.publisher import DevicePublisher
from asyncrl.weights.device.subscriber import DeviceSubscriber
from asyncrl.weights.device.transports import Broadcast

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CHUNK_BYTES = 16 << 20
WAIT_S = 120.0
_BYTES_ACKED = 120
"""Offset in struct tcp_info of linux/tcp.h."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="in multiples of 16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "weights_broadcast.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo over loopback",
        "load_before": os.getloadavg(), "bytes": options.megabytes << 20, "rows": [],
    }  # fmt: skip
    print("| engines | | copies sent by the learner | s, least | s, median | CPU s of the learner |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for engines in options.engines:
        for how in ("alone", "together"):
            row = measured(engines, how, options.megabytes << 20, options.repeats)
            found["rows"].append(row)
            keep(options.out, found)
            figures = f"{row['copies']:.2f} | {row['s_least']:.2f} | {row['s_median']:.2f} | {row['cpu_s']:.2f}"
            print(f"| {engines} | {how} | {figures} |", flush=True)
    finish(options.out, found | {"load_after": os.getloadavg()})


def measured(engines: int, how: str, size: int, repeats: int) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    tensors = [(f"w{i}", torch.zeros(CHUNK_BYTES, dtype=torch.uint8)) for i in range(size // CHUNK_BYTES)]
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/w"
        transport = Alone(folder) if how == "alone" else Together(folder)
        learner = DevicePublisher(address, transport, CPU, slots=1, chunk_bytes=CHUNK_BYTES)
        pipes, processes = [], []
        for i in range(engines):
            here, there = multiprocessing.Pipe()
            pipes.append(here)
            processes.append(spawn.Process(target=engine, args=(address, f"engine-{i}", there), daemon=True))
            processes[-1].start()
        try:
            seconds, copies, cpu = [], [], []
            for version in range(repeats + 2):  # two to meet: the second together
                for _, tensor in tensors:
                    tensor.fill_(version)
                learner.publish(0, version, tensors)
                before, began, cpu_began = acknowledged(), time.monotonic(), time.process_time()
                for pipe in pipes:
                    pipe.send(version)
                for pipe in pipes:
                    if not pipe.poll(WAIT_S) or pipe.recv() != version:
                        raise SystemExit(f"an engine did not get version {version} within {WAIT_S:g} s")
                if version > 1:
                    seconds.append(time.monotonic() - began)
                    cpu.append(time.process_time() - cpu_began)
                    copies.append((acknowledged() - before) / size)
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.join(10)
            learner.close()
    return {
        "engines": engines, "how": how, "copies": statistics.median(copies), "s_least": min(seconds),
        "s_median": statistics.median(seconds), "cpu_s": statistics.median(cpu), "s": seconds,
    }  # fmt: skip


class Together(Broadcast):
    def __init__(self, folder: str) -> None:
        super().__init__("gloo", Path(folder))


class Alone(Together):
    """No group of several: each engine is sent to by itself, in a thread of its own."""

    free = False  # type: ignore[assignment]


def engine(address: str, name: str, told: Connection) -> None:
    torch.set_num_threads(1)
    actor = DeviceSubscriber(address, name, lambda: CPU)
    while True:
        version = told.recv()
        while (newest := actor.latest()) is None or newest.version != version:
            time.sleep(0.001)
        leased = actor.open()
        right = all(int(tensor[0]) == version for _, tensor in leased.tensors())
        leased.close()
        told.send(version if right else -1)


def acknowledged() -> int:
    """Bytes that this process has sent over TCP, of the sockets that are open."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        total += struct.unpack_from("Q", info, _BYTES_ACKED)[0]
    return total


if __name__ == "__main__":
    main()
