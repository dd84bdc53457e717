"""What the buffer carries, beside what it could be measured against, in one go.

    asyncrl            the real buffer process; up to 8 puts at once from each producer, in two requests of 4, each
                       answered after its commit; then a learner takes everything out, batch by batch. `fsync` commit,
                       interval, off
    bare ZeroMQ pipe   the same frames, PUSH to PULL: nothing is decoded, written or answered
    disk               the same bytes in blocks of 1 MiB, one fdatasync at the end; the median of one before, one after
                       and one between the runs of the cell
    Redis streams      redis-server, AOF everysec, the same records, 8 XADD at once per client; XREAD out
    Ray                object store, put and get of the same records
                       (both need the `bench` extra, and a redis-server; --without leaves them out)

and: peak memory, the time to restart with many waiting groups, the latency of a put at 200 a second. CPU is that of the
process that is measured; that of its clients, which on two cores it shares them with, stands beside it. Prints tables
and the targets, writes bench/results/buffer.json. About five minutes on two quiet cores; an interrupted run goes on
where it was when it is started again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import buffer_rivals as rivals
import needs
import numpy as np
import psutil
import zmq
from buffer_report import AIM, Found, line, show, targets

from asyncrl.buffer.client import AsyncBufferClient, BufferClient, codec, messages
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.record import to_record
from asyncrl.buffer.rules import Rules
from asyncrl.buffer.tasks.sources import open_source
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import Endpoint, Link
from asyncrl.trajectory import CONTEXT, LogHead, Row, Ticket, TicketId, Trajectory, TurnRecord
from asyncrl.wire import unpack

ROOT = Path(__file__).parents[2]
GROUP, GROUPS_PER_STEP = 8, 8
TOGETHER = 4
"""Puts in one request: a client that has several sends them together."""
LONGEST = 1 << 20
"""Tokens of a trajectory that the buffer accepts (`env.max_tokens`)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--producers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 32768], help="per trajectory")
    parser.add_argument("--mb", type=float, default=100, help="payload of one measurement; four times that at 4096 / 8")
    parser.add_argument("--repeats", type=int, default=3, help="of the cell 4096 / 8, which the targets are about")
    parser.add_argument("--groups", type=int, default=10_000, help="that wait when the buffer is restarted")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: a temporary one")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "buffer.json")
    parser.add_argument("--again", action="store_true", help="measure everything, also what an interrupted run has")
    parser.add_argument("--without", nargs="*", choices=("redis", "ray"), default=[], help="rows to leave out")
    args = parser.parse_args()
    for package, what in (("redis", "Redis streams"), ("ray", "Ray")):
        if package not in args.without:
            leave = f"or leave the row out (--without {package})"
            needs.packages(package, of=f"the row of {what}", remedy=f"pip install -e '.[bench]', {leave}")
            if package == "redis":
                needs.program("redis-server", of=f"the row of {what}", remedy=f"apt install redis-server, {leave}")
    settings = {
        name: str(getattr(args, name))
        for name in ("producers", "tokens", "mb", "repeats", "groups", "folder", "without")
    }
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-", dir=args.folder) as folder:
        results = measured(Path(folder), args, Parts(args.out.with_suffix(".part.json"), settings, args.again))
    results["targets"] = targets(results)
    results["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    args.out.with_suffix(".part.json").unlink()
    show(results)
    print(f"\nwritten to {args.out}")


class Parts:
    """What an interrupted run with the same settings has measured is not measured again."""

    def __init__(self, path: Path, settings: dict[str, str], again: bool) -> None:
        self._path = path
        self._kept: dict[str, Any] = {"settings": settings}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not again:
            found = json.loads(path.read_text())
            self._kept = found if found["settings"] == settings else self._kept

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        if name not in self._kept:
            self._kept[name] = measure()
            self._path.write_text(json.dumps(self._kept))
        return self._kept[name]


def measured(folder: Path, args: argparse.Namespace, parts: Parts) -> dict[str, Any]:
    rows: list[Found] = []
    for tokens in args.tokens:
        for producers in args.producers:
            wanted = (tokens, producers) == AIM
            n = trajectories(tokens, args.mb * (4 if wanted else 1))
            for repeat in range(args.repeats if wanted else 1):

                def measure(producers: int = producers, tokens: int = tokens, n: int = n) -> list[Found]:
                    return cell(folder, producers, tokens, n, redis="redis" not in args.without)

                rows += parts.get(f"{tokens} tokens, {producers} producers, {repeat}", measure)
    for tokens in args.tokens if "ray" not in args.without else ():
        n, record = trajectories(tokens, args.mb), to_record(trajectory(TicketId(0, 0, 0), tokens))

        def store(n: int = n, record: bytes = record, tokens: int = tokens) -> list[Found]:
            return [_row(1, tokens, n, record, {"what": "Ray object store", **rivals.ray_store(record, n)})]

        rows += parts.get(f"{tokens} tokens, Ray", store)
    return {
        "throughput": rows,
        "producer": parts.get("producer", lambda: [producer(tokens) for tokens in args.tokens]),
        "latency": parts.get("latency", lambda: [latency(folder / "run", fsync) for fsync in ("commit", "interval")]),
        "restart": parts.get("restart", lambda: restart(folder / "run", args.groups, group_size=2)),
    }


def cell(folder: Path, producers: int, tokens: int, n: int, *, redis: bool) -> list[Found]:
    record = to_record(trajectory(TicketId(0, 0, 0), tokens))
    disk = [rivals.disk(folder, record, n)]
    found = [through_the_buffer(folder / "run", producers, tokens, n, fsync) for fsync in ("commit", "interval", "off")]
    disk.append(rivals.disk(folder, record, n))
    found.append({"what": "bare ZeroMQ pipe", "in": rivals.pipe(folder, producers, record, n)})
    if redis:
        found.append({"what": "Redis streams", **rivals.redis_streams(folder / "redis", producers, record, n)})
    disk.append(rivals.disk(folder, record, n))
    found.append({"what": "disk, sequential", "in": {"seconds": statistics.median(disk), "each": disk}})
    return [_row(producers, tokens, n, record, row) for row in found]


def _row(producers: int, tokens: int, n: int, record: bytes, found: Found) -> Found:
    row = {"producers": producers, "tokens": tokens, "trajectories": n, "bytes": len(record) * n} | found
    print(line(row), flush=True)
    return row


def producer(tokens: int) -> Found:
    """CPU of one core that a client needs per trajectory, in us; what was sent above was made beforehand."""
    made = trajectory(TicketId(0, 0, 0), tokens)
    record = to_record(made)
    work: dict[str, Callable[[], Any]] = {"encode": lambda: to_record(made), "digest": made.digest}
    with contextlib.suppress(ImportError):
        import redis

        packed = redis.Connection()
        work["redis: pack"] = lambda: packed.pack_command("XADD", "bench", "*", "record", record)
    return {"tokens": tokens} | {
        name: 1e6 * min(timeit.repeat(f, number=50, repeat=5)) / 50 for name, f in work.items()
    }


def trajectories(tokens: int, mb: float) -> int:
    """Whole batches, so that the learner can take all of it out."""
    batch = GROUP * GROUPS_PER_STEP
    return max(batch, round(min(mb * 1e6 / (13 * tokens), 20_000) / batch) * batch)


def trajectory(ticket: Ticket | TicketId, tokens: int, actor: str = "bench") -> Trajectory:
    mask = np.arange(tokens) % 4 > 0
    row = Row(
        np.arange(tokens, dtype=np.int32),
        mask,
        np.where(mask, np.float32(-0.5), np.float32(0)),
        np.where(mask, 0, CONTEXT).astype(np.int32),
    )
    id, attempt, task = (
        (ticket, 0, "") if isinstance(ticket, TicketId) else (ticket.id, ticket.attempt, ticket.task["id"])
    )
    turn = TurnRecord(0.01, 1.5, 0.25, int((~mask).sum()), int(mask.sum()))
    about = ("train", actor, str(task), "bench", (row,), id.index % 2, {}, 1, "done")
    line = LogHead(id.group * GROUP + id.index, "0" * 32)
    return Trajectory(id, attempt, *about, turn_records=(turn,), logged=line)


def config(fsync: str, capacity: int, tokens: int, **learner: int) -> Config:
    sizes = {"groups_per_step": GROUPS_PER_STEP, "group_size": GROUP, "steps": 10**9} | learner
    # Nothing is refused here but by capacity.
    buffer = {"capacity": capacity, "max_staleness": 10**6, "fsync": fsync, "lease_s": 3600, "max_disk_gb": 1000}
    rows = {"max_tokens": max(tokens, 256)}
    return Config.model_validate({"learner": sizes, "buffer": buffer, "env": rows, "eval": {"tasks": 0}})


@contextmanager
def started(path: Path, config: Config) -> Iterator[tuple[RunFolder, psutil.Process, float]]:
    """The buffer process, its run, and the seconds until it answered; goes on with the ledger in the folder."""
    run = RunFolder.create(path, config) if not (path / "run.json").exists() else RunFolder.existing(path)
    begun = time.perf_counter()
    with (path / "log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "asyncrl.buffer", str(path)], stderr=log)
    try:
        with closing(BufferClient(run.address("buffer"), identity="bench", deadline_s=120)) as client:
            client.status()
        yield run, psutil.Process(process.pid), time.perf_counter() - begun
    finally:
        process.terminate()
        process.wait(60)
        run.remove_temporary()
        shutil.rmtree(path)


def through_the_buffer(path: Path, producers: int, tokens: int, n: int, fsync: str) -> Found:
    """n trajectories in through `producers` clients, then out to one learner."""
    with started(path, config(fsync, n, tokens)) as (run, process, _):
        idle = process.memory_info().rss
        with closing(BufferClient(run.address("buffer"), identity="learner", deadline_s=120)) as learner:
            incarnation = learner.start(0, 0, None).incarnation
            learner.published(incarnation, 0, 0, "bench")
            here, there = multiprocessing.Pipe()
            child = multiprocessing.get_context("spawn").Process(
                target=produce, args=(run.address("buffer"), producers, tokens, n, there)
            )
            child.start()
            there.close()  # a child that dies is an EOFError here
            assert here.recv() == "ready"
            with rivals.cpu(process) as into, rivals.cpu(psutil.Process(child.pid)) as clients:
                here.send("go")
                seconds = here.recv()
            here.send("end")
            child.join(60)
            with rivals.cpu(process) as out:
                begun = time.perf_counter()
                for b in range(n // (GROUP * GROUPS_PER_STEP)):
                    reply = learner.batch(incarnation, b, 0, 1, wait_s=30)
                    assert reply.state == "ready", reply.why
                    learner.finished(incarnation, b, "applied")
                taken = time.perf_counter() - begun
        peak = int(
            next(s for s in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmHWM" in s).split()[1]
        )
    return {
        "what": f"asyncrl, fsync {fsync}",
        "in": {"seconds": seconds, "cpu_s": into[0], "clients_cpu_s": clients[0]},
        "out": {"seconds": taken, "cpu_s": out[0]},
        "rss_idle_mb": idle / 1e6,
        "rss_peak_mb": peak * 1024 / 1e6,
    }


def produce(address: Endpoint, producers: int, tokens: int, n: int, pipe: Connection) -> None:
    """Puts, encoded beforehand: a client's work is done on an actor's cores, and here there may be two in all."""
    todo: dict[zmq.Socket[bytes], list[list[Any]]] = {}
    for i in range(producers):
        name, wanted = f"actor-{i}", n // producers + (i < n % producers)
        with closing(BufferClient(address, identity=name, deadline_s=120)) as client:
            tickets = client.tickets(name, (0, 0), wanted, [], 30).tickets
        assert len(tickets) == wanted
        parts = [tickets[i : i + TOGETHER] for i in range(0, wanted, TOGETHER)]
        header = messages.PutRequest()
        frames = [
            [codec.encode_request(header, n), *(to_record(trajectory(ticket, tokens, name)) for ticket in part)]
            for n, part in enumerate(parts)
        ]
        sender = Link(zmq.Context.instance(), zmq.DEALER, address).socket
        todo[sender] = frames
    pipe.send("ready")
    pipe.recv()
    begun = time.perf_counter()
    pipe.send(_answered(todo) - begun)
    pipe.recv()
    for sender in todo:
        sender.close(linger=0)


def _answered(todo: dict[zmq.Socket[bytes], list[list[Any]]]) -> float:
    """Sends everything, so many at once from each; gives the time of the last answer."""
    poller = zmq.Poller()
    left = 0
    for sender, frames in todo.items():
        poller.register(sender, zmq.POLLIN)
        left += len(frames)
        for _ in range(min(rivals.AT_ONCE // TOGETHER, len(frames))):
            sender.send_multipart(frames.pop(), copy=False)
    while left:
        ready = poller.poll(60_000)
        assert ready, f"{left} puts were not answered for 60 s"
        for sender, _ in ready:
            answer = unpack(sender.recv_multipart()[0])
            assert all(put == "stored" for put in answer.get("reply") or [answer]), answer
            left -= 1
            if todo[sender]:
                sender.send_multipart(todo[sender].pop(), copy=False)
    return time.perf_counter()


def latency(path: Path, fsync: str, per_s: int = 200, seconds: int = 5, tokens: int = 4096) -> Found:
    """Of puts at a steady rate, in ms, from the call to the answer; the commit interval is part of it."""
    n = per_s * seconds

    async def steady(address: Endpoint) -> list[float]:
        client = AsyncBufferClient(address, identity="actor-0", deadline_s=60)
        made = [trajectory(t, tokens, "actor-0") for t in (await client.tickets("actor-0", (0, 0), n, [], 30)).tickets]
        found: list[float] = []

        async def one(t: Trajectory, at: float) -> None:
            await asyncio.sleep(at - time.perf_counter())
            begun = time.perf_counter()
            await client.put(t)
            found.append(1000 * (time.perf_counter() - begun))

        begun = time.perf_counter() + 0.2
        await asyncio.gather(*(one(t, begun + i / per_s) for i, t in enumerate(made)))
        await client.close()
        return found

    settings = config(fsync, n + GROUP, tokens)
    with started(path, settings) as (run, _, _):
        with closing(BufferClient(run.address("buffer"), identity="learner")) as learner:
            learner.published(learner.start(0, 0, None).incarnation, 0, 0, "bench")
        found = sorted(asyncio.run(steady(run.address("buffer"))))
    return {
        "fsync": fsync,
        "per_s": per_s,
        "commit_ms": settings.buffer.commit_ms,
        "p50_ms": statistics.median(found),
        "p99_ms": found[int(0.99 * len(found))],
        "max_ms": found[-1],
    }


def restart(path: Path, groups: int, group_size: int) -> Found:
    """Seconds from the start of the process to its first answer, with so many groups waiting."""
    settings = config("off", groups * group_size, 8, groups_per_step=1, group_size=group_size)
    run = RunFolder.create(path, settings)
    database = Database(run.buffer, "off")
    buffer = Buffer(database, Rules.of(settings), open_source(settings), 0.0)
    buffer.published(buffer.start(0, 0, None).incarnation, 0, 0, "bench")
    while buffer.ledger.account.count("waiting") < groups:
        for ticket in buffer.issue(0.0, "bench", (0, 0), 1024)[0]:
            made = trajectory(ticket, 8)
            buffer.accept(made, to_record(made))
        buffer.commit(0.0)
    database.close()
    with started(path, settings) as (_, process, seconds):
        rss = process.memory_info().rss / 1e6
    return {"groups": groups, "group_size": group_size, "seconds": seconds, "rss_mb": rss}


if __name__ == "__main__":
    main()
