"""What the buffer is measured against: a bare pipe, the disk, Redis streams, Ray's object store. The same records."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import zmq

AT_ONCE = 8
"""Records that one client has under way, as an actor has."""


@contextmanager
def cpu(process: psutil.Process) -> Iterator[list[float]]:
    """Seconds of CPU that the process used inside the block: the first entry, after it."""
    used: list[float] = []
    before = process.cpu_times()
    yield used
    after = process.cpu_times()
    used.append(after.user + after.system - before.user - before.system)


def pipe(folder: Path, producers: int, record: bytes, n: int) -> dict[str, float]:
    """PUSH to PULL over ipc, from another process."""
    with zmq.Context() as context, context.socket(zmq.PULL) as sink:
        address = f"ipc://{folder}/pipe"
        sink.bind(address)
        child = multiprocessing.get_context("spawn").Process(target=_push, args=(address, producers, record, n))
        child.start()
        for _ in range(producers):
            sink.recv_multipart(copy=False)  # connected, one from each
        with cpu(psutil.Process()) as used:
            begun = time.perf_counter()
            for _ in range(n):
                sink.recv_multipart(copy=False)
            seconds = time.perf_counter() - begun
        child.join(60)
    return {"seconds": seconds, "cpu_s": used[0]}


def _push(address: str, producers: int, record: bytes, n: int) -> None:
    with zmq.Context() as context:
        sockets = [context.socket(zmq.PUSH) for _ in range(producers)]
        for sender in sockets:
            sender.connect(address)
            sender.send_multipart([b"hello", b""])
        for i in range(n):
            sockets[i % producers].send_multipart([b"put", record], copy=False)
        for sender in sockets:
            sender.close(linger=60_000)


def disk(folder: Path, record: bytes, n: int) -> float:
    """Seconds."""
    path = folder / "sequential"
    total, block = len(record) * n, os.urandom(1 << 20)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    begun = time.perf_counter()
    for start in range(0, total, len(block)):
        os.write(file, block[: total - start])
    os.fdatasync(file)
    seconds = time.perf_counter() - begun
    os.close(file)
    path.unlink()
    return seconds


def redis_streams(folder: Path, producers: int, record: bytes, n: int) -> dict[str, Any]:
    import redis

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir()
    words = f"--port {port} --bind 127.0.0.1 --dir {folder} --appendonly yes --appendfsync everysec --daemonize no"
    process = subprocess.Popen(["redis-server", *words.split(), "--save", ""], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(port=port)
        deadline = time.monotonic() + 30
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(target=_xadd, args=(port, producers, record, n, there))
        child.start()
        there.close()
        assert here.recv() == "ready"
        measured = psutil.Process(process.pid)
        with cpu(measured) as into, cpu(psutil.Process(child.pid)) as clients:
            here.send("go")
            seconds = here.recv()
        here.send("end")
        child.join(60)
        with cpu(measured) as out:
            begun = time.perf_counter()
            last: Any = "0"
            for _ in range(0, n, 64):
                [[_, entries]] = client.xread({"bench": last}, count=64)
                last = entries[-1][0]
            taken = time.perf_counter() - begun
        peak = client.info("memory")["used_memory_peak"] / 1e6
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder)
    return {
        "in": {"seconds": seconds, "cpu_s": into[0], "clients_cpu_s": clients[0]},
        "out": {"seconds": taken, "cpu_s": out[0]},
        "rss_peak_mb": peak,
    }


def _xadd(port: int, producers: int, record: bytes, n: int, pipe: Connection) -> None:
    """Commands packed beforehand, as the buffer's puts are."""
    import redis

    connections = [redis.Connection(port=port) for _ in range(producers)]
    for connection in connections:
        connection.connect()
    command = connections[0].pack_command("XADD", "bench", "*", "record", record)
    left = [n // producers + (i < n % producers) for i in range(producers)]
    pipe.send("ready")
    pipe.recv()
    begun = time.perf_counter()
    sent = [0] * producers
    while any(left) or any(sent):
        for i, connection in enumerate(connections):
            while left[i] and sent[i] < AT_ONCE:
                connection.send_packed_command(command)
                left[i], sent[i] = left[i] - 1, sent[i] + 1
        for i, connection in enumerate(connections):
            # One answer, one more command: the window stays full.
            if sent[i]:
                connection.read_response()
                sent[i] -= 1
    pipe.send(time.perf_counter() - begun)
    pipe.recv()
    for connection in connections:
        connection.disconnect()


def ray_store(record: bytes, n: int) -> dict[str, Any]:
    """Put and got by one process: Ray copies into shared memory and writes nothing to a disk."""
    import ray

    store = 2 * n * len(record) + (100 << 20)
    ray.init(
        "local",  # whatever other cluster runs here
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=store,
        _node_ip_address="127.0.0.1",
    )
    try:
        begun = time.perf_counter()
        references = [ray.put(record) for _ in range(n)]
        put = time.perf_counter() - begun
        begun = time.perf_counter()
        for reference in references:
            ray.get(reference)
        got = time.perf_counter() - begun
    finally:
        ray.shutdown()
    return {"in": {"seconds": put}, "out": {"seconds": got}}
