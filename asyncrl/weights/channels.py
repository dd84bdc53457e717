"""The channels of weights, by name (`weights.channel`). No torch is imported until weights are sent or received."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from asyncrl.config import Config
from asyncrl.plugins import build
from asyncrl.run_folder import RunFolder

if TYPE_CHECKING:
    from asyncrl.weights.device.publisher import DevicePublisher
    from asyncrl.weights.protocol import Publisher, Subscriber


class Channel(Protocol):
    server: str | None
    """Module of a server role, started on the learner's host as `python -m MODULE RUN`; or None."""

    def publisher(self, run: RunFolder) -> Publisher:
        """The learner's end."""
        ...

    def subscriber(self, run: RunFolder) -> Subscriber:
        """An actor's end."""
        ...


class Shm:
    """One host: actors read what the learner writes."""

    server: str | None = None

    def publisher(self, run: RunFolder) -> Publisher:
        from asyncrl.weights.local.shm import ShmPublisher

        return ShmPublisher(run.shm)

    def subscriber(self, run: RunFolder) -> Subscriber:
        from asyncrl.weights.local.shm import ShmSubscriber

        return ShmSubscriber(run.shm)


class Zmq:
    """Several hosts: the learner writes on its host, a server serves that, and each other host fetches it once."""

    server: str | None = "asyncrl.weights"

    def publisher(self, run: RunFolder) -> Publisher:
        from asyncrl.weights.local.shm import ShmPublisher

        return ShmPublisher(run.shm)

    def subscriber(self, run: RunFolder) -> Subscriber:
        from asyncrl.weights.network.subscriber import MirroredSubscriber

        relays = run.load_config().weights.fanout > 0
        return MirroredSubscriber(run.shm / "mirror", run.address("weights"), relays)


class CudaIpc:
    """Learner and engines on one GPU: engines map the learner's copy of a version."""

    server: str | None = None

    def publisher(self, run: RunFolder) -> Publisher:
        from asyncrl.weights.device.cuda_ipc import require_cuda
        from asyncrl.weights.device.publisher import DevicePublisher
        from asyncrl.weights.device.transports import Mapped

        return pinning(run, DevicePublisher(run.address("weights"), Mapped(), require_cuda("cuda_ipc")))

    def subscriber(self, run: RunFolder) -> Subscriber:
        from asyncrl.weights.device.cuda_ipc import require_cuda
        from asyncrl.weights.device.subscriber import DeviceSubscriber

        return pinned(run, DeviceSubscriber(run.address("weights"), _reader(), lambda: require_cuda("cuda_ipc")))


class Nccl:
    """GPUs of one or several hosts: the learner broadcasts a version to each engine that asks for it."""

    server: str | None = None

    def publisher(self, run: RunFolder) -> Publisher:
        from asyncrl.weights.device.cuda_ipc import require_cuda
        from asyncrl.weights.device.publisher import DevicePublisher
        from asyncrl.weights.device.transports import Broadcast

        device = require_cuda("nccl")
        slots = device_copies(run.load_config())
        transport = Broadcast("nccl", run.rendezvous.parent)
        return pinning(run, DevicePublisher(run.address("weights"), transport, device, slots=slots))

    def subscriber(self, run: RunFolder) -> Subscriber:
        from asyncrl.weights.device.cuda_ipc import require_cuda
        from asyncrl.weights.device.subscriber import DeviceSubscriber

        return pinned(run, DeviceSubscriber(run.address("weights"), _reader(), lambda: require_cuda("nccl")))


def pinning(run: RunFolder, device: DevicePublisher) -> Publisher:
    """`device`; if the run evaluates while it trains (`eval.every`), with pinned versions in host memory."""
    if not run.load_config().eval.every:
        return device
    from asyncrl.weights.device.host_copy import PinningPublisher

    return PinningPublisher(device, run.shm)


def pinned(run: RunFolder, device: Subscriber) -> Subscriber:
    """The actors' end of `pinning`: pinned versions are read here, or, in a run over several hosts, fetched."""
    config = run.load_config()
    if not config.eval.every:
        return device
    from asyncrl.weights.device.host_copy import PinnedSubscriber
    from asyncrl.weights.local.shm import ShmSubscriber
    from asyncrl.weights.network.subscriber import MirroredSubscriber

    if not config.launch.host:
        return PinnedSubscriber(device, ShmSubscriber(run.shm))
    return PinnedSubscriber(device, MirroredSubscriber(run.shm / "mirror", run.address(PINNED)))


def _reader() -> str:
    """A name of this process; a restarted process has another."""
    return f"{os.environ.get('ASYNCRL_ROLE', 'actor')}.{os.getpid()}"


CHANNELS: dict[str, type[Channel]] = {"shm": Shm, "zmq": Zmq, "cuda_ipc": CudaIpc, "nccl": Nccl}
ON_DEVICE = frozenset(("cuda_ipc", "nccl"))
"""Channels whose versions engines receive by vLLM's weight-transfer API."""

PINNED = "pinned"
"""Name of the address at which the pinned versions of such a channel are served to other hosts."""


def server(config: Config) -> str | None:
    """Module of the server role of `weights.channel`, or None. Versions on GPUs have one for what is pinned."""
    pins = config.weights.channel in ON_DEVICE and config.eval.every and config.launch.host
    return "asyncrl.weights" if pins else channel(config).server


def device_copies(config: Config) -> int:
    """Copies of the weights on the learner's GPU, beside those in training. Over `nccl` an engine leases one for the
    time of a transfer, so that one is enough and a publication waits for the transfers that run. An engine that drains
    has it leased until its requests have ended, and two let training go on meanwhile."""
    if config.weights.channel == "nccl":
        return 2 if config.weights.drain else 1
    return 2 if config.weights.channel in ON_DEVICE else 0


def channel(config: Config) -> Channel:
    """The channel that `weights.channel` names. Raises ConfigError."""
    made: Channel = build(config.weights.channel, CHANNELS, "weights.channel", {})
    return made
