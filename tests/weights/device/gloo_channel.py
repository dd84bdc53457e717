"""What `weights.channel: nccl` is, between CPUs: `weights.channel: tests/weights/device/gloo_channel.py:Gloo`."""

from __future__ import annotations

import torch

from asyncrl.run_folder import RunFolder
from asyncrl.weights.channels import _reader, pinned, pinning
from asyncrl.weights.device.publisher import DevicePublisher
from asyncrl.weights.device.subscriber import DeviceSubscriber
from asyncrl.weights.device.transports import Broadcast
from asyncrl.weights.protocol import Publisher, Subscriber

CPU = torch.device("cpu")


class Gloo:
    server: str | None = None

    def publisher(self, run: RunFolder) -> Publisher:
        return pinning(run, DevicePublisher(run.address("weights"), Broadcast("gloo", run.rendezvous.parent), CPU))

    def subscriber(self, run: RunFolder) -> Subscriber:
        return pinned(run, DeviceSubscriber(run.address("weights"), _reader(), lambda: CPU))
