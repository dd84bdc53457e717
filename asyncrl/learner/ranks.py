"""The processes that train together: the orders of rank 0, and the exchange of shares of a batch.

Rank 0 leads: it alone exchanges batches, versions and checkpoints with the buffer, and orders the other ranks to act
(follower.py). Every exchange has a deadline; when a rank dies, the launcher kills the others, and all start again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgpack
import torch
import torch.distributed as dist

from asyncrl.buffer.client import BatchReply
from asyncrl.config import Config
from asyncrl.wire import decode_trajectory, encode_trajectory, pack, unpack
from asyncrl.wire.teacher_scores import GroupScores, from_record, to_record

SPARE_S = 60.0
"""Time that rank 0 may take between two orders, beyond an exchange and an outage of the buffer or a checkpoint."""
Do = Literal["wait", "load", "train", "publish", "save", "end"]


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """The next action of all ranks."""

    do: Do
    path: str = ""
    """load, save: a checkpoint's folder"""
    incarnation: int = 0
    """train: the incarnation that the batch is requested for"""
    batch: int = 0
    version: int = 0


class Ranks:
    """A single process: rank 0 of 1, which exchanges nothing."""

    rank, size = 0, 1

    def order(self, order: Order) -> None:
        """Called by rank 0."""

    def next(self) -> Order:
        """Called by the other ranks. Raises RuntimeError when rank 0 gives no order in time."""
        raise ValueError("rank 0 takes no orders")

    def gather(self, reply: BatchReply) -> BatchReply:
        """The whole batch, from the shares of all ranks; the same on each."""
        return reply

    def leave(self) -> None:
        """Called by a rank that ends in order."""


class DistributedRanks(Ranks):
    """Several processes, connected by torch.distributed."""

    def __init__(self, config: Config, rank: int, rendezvous: Path) -> None:
        """Joins the others at the file `rendezvous`, which must be unused. Raises torch's DistStoreError when they do
        not join within `launch.start_s`."""
        self.rank, self.size = rank, config.learner.ranks
        wait = timedelta(seconds=config.learner.collective_s)
        store = dist.FileStore(str(rendezvous), self.size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=config.launch.start_s))
        kinds = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(kinds, store=store, rank=rank, world_size=self.size, timeout=wait)
        # While rank 0 waits for the buffer during an outage, or for a checkpoint, the others get no order.
        pause = max(config.launch.restart_window_s, config.learner.checkpoint_s)
        patience = wait + timedelta(seconds=pause + SPARE_S)
        self._orders = dist.new_group(backend="gloo", timeout=patience)

    def order(self, order: Order) -> None:
        self._broadcast(pack(dataclasses.asdict(order)))

    def next(self) -> Order:
        return Order(**unpack(self._broadcast(b"")))

    def gather(self, reply: BatchReply) -> BatchReply:
        shares = [_decode(share) for share in self._all_gather(_encode(reply))]
        return dataclasses.replace(
            reply,
            trajectories=[t for share in shares for t in share.trajectories],
            digests=tuple(d for share in shares for d in share.digests),
            weights=tuple(w for share in shares for w in share.weights),
            scores=[scores for share in shares for scores in share.scores],
        )

    def leave(self) -> None:
        dist.destroy_process_group()

    def _broadcast(self, payload: bytes) -> bytes:
        size = torch.tensor([len(payload)])
        dist.broadcast(size, 0, group=self._orders)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._orders)
        return bytes(data.numpy())

    def _all_gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in rank order."""
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(payload)]), group=self._orders)
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded, group=self._orders)
        return [bytes(data[: int(n)].numpy()) for data, n in zip(received, sizes, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Share:
    trajectories: Sequence[Any]
    digests: Sequence[str]
    weights: Sequence[float]
    scores: Sequence[GroupScores]


def _encode(reply: BatchReply) -> bytes:
    frames = [[bytes(frame) for frame in encode_trajectory(t)] for t in reply.trajectories]
    scores = [to_record(each) for each in reply.scores]
    of_each = {"digests": list(reply.digests), "weights": list(reply.weights), "scores": scores}
    return pack({"trajectories": frames, **of_each})


def _decode(share: bytes) -> _Share:
    fields = msgpack.unpackb(share, raw=False)  # from a process of the same run, and of any size
    trajectories = [decode_trajectory(frames) for frames in fields["trajectories"]]
    scores = [from_record(record) for record in fields["scores"]]
    return _Share(trajectories, fields["digests"], fields["weights"], scores)
