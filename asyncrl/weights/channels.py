"""How weights travel, by name (`weights.channel`). Without torch until weights are sent or received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.plugins import resolve
from asyncrl.run_folder import RunFolder

if TYPE_CHECKING:
    from asyncrl.weights.protocol import Publisher, Subscriber


class Channel(Protocol):
    server: str | None
    """Module of a role of its own, started beside the learner as `python -m MODULE RUN`; or None."""

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
        from asyncrl.weights.shm import ShmPublisher

        return ShmPublisher(run.shm)

    def subscriber(self, run: RunFolder) -> Subscriber:
        from asyncrl.weights.shm import ShmSubscriber

        return ShmSubscriber(run.shm)


class Zmq:
    """Several hosts: the learner writes for its host, a server hands that on, each host fetches it once."""

    server: str | None = "asyncrl.weights"

    def publisher(self, run: RunFolder) -> Publisher:
        from asyncrl.weights.shm import ShmPublisher

        return ShmPublisher(run.shm)

    def subscriber(self, run: RunFolder) -> Subscriber:
        from asyncrl.weights.mirrored import MirroredSubscriber

        return MirroredSubscriber(run.shm / "mirror", run.address("weights"))


CHANNELS: dict[str, type[Channel]] = {"shm": Shm, "zmq": Zmq}


def channel(config: Config) -> Channel:
    """Raises ConfigError."""
    try:
        return resolve(config.weights.channel, CHANNELS, "weights.channel")()
    except ValueError as error:
        raise ConfigError(str(error)) from error
