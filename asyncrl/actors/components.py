"""The components that one actor is made of; `__main__` builds them."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.actors.ack_log import AckLog
from asyncrl.actors.engines.protocol import Engine
from asyncrl.actors.leases import LeaseKeeper
from asyncrl.actors.player import Play
from asyncrl.actors.weight_updates import WeightUpdates
from asyncrl.buffer.client.retry import Buffer
from asyncrl.tracking.reporter import Reporter


@dataclass(frozen=True, slots=True)
class Components:
    engine: Engine
    play: Play
    buffer: Buffer
    updates: WeightUpdates
    keeper: LeaseKeeper
    reporter: Reporter
    acks: AckLog
