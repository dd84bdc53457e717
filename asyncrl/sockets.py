"""Makes all sockets: decides who may connect, how roles find each other, how large a message may be.

    one host       ipc:// in a folder that only its owner can read
    several hosts  tcp:// with CURVE, and only for peers with the run's keys (keys.py): others get nothing, not
                   an error; a process before the role (acceptor/) takes the connections, so that they use up no files

A role that listens on tcp takes a free port and announces it in the run folder. Its peers read that, and read it again
while they get no answer, so that they find a role that was restarted, even on another host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as plain
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import zmq
from zmq.auth.thread import ThreadAuthenticator

from asyncrl.acceptor import AcceptorProcess
from asyncrl.errors import RunError
from asyncrl.keys import Keys

log = logging.getLogger(__name__)

HOST = "ASYNCRL_HOST"
"""Environment variable with which a launcher sets the address of this host on which a role listens."""
RELAYED = "ASYNCRL_RELAYED"
"""Environment variable: a relay (asyncrl/chaos/faults/network.py) is between listener and peers. The listener announces
itself in a file of its own; the relay reads that, and announces itself where peers look."""
HEARTBEAT_MS = 5_000
SILENT_MS = 20_000
"""The connection of a tcp peer that is silent for so long is closed."""
DOMAIN = "asyncrl"
HANDSHAKE_MS = 10_000
"""Within so many milliseconds a peer has shown its keys."""
_FRAMES_HELD = 4
_LEAST_HELD = 16 << 20
"""Bytes that a tcp peer may have sent and the role not received: so many of the largest frames, and at least these. All
parts of a message count."""
_LOCAL = ("ipc://", "inproc://")
S = TypeVar("S", bound=zmq.Socket[Any])


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a role of a run listens."""

    name: str
    address: str = ""
    """ipc://...; empty for tcp, where the role announces it."""
    announced: Path | None = None
    """The file in which the role announces it."""
    keys: Keys | None = None
    host: str = ""
    """The address on which the role listens if it is started on this host."""
    folder: Path | None = None
    """Where the launch has its sockets, on the host of its launcher."""

    @classmethod
    def of(cls, where: Endpoint | str) -> Endpoint:
        """The endpoint of an address. Raises RunError for tcp, which needs keys."""
        if isinstance(where, Endpoint):
            return where
        if not where.startswith(_LOCAL):
            raise RunError(f"{where} is not an address of this host; others need keys: use RunFolder.address.")
        return cls(where, where)

    def now(self) -> str:
        """The address; empty until the role has announced one."""
        if self.announced is None:
            return self.address
        try:
            return self.announced.read_text()
        except FileNotFoundError:
            return ""

    def __str__(self) -> str:
        return self.now() or f"{self.name} (not announced yet)"


class Listener:
    """A bound socket, in a context of its own. `socket` is for one thread."""

    def __init__(self, kind: int, where: Endpoint | str, max_bytes: int, options: Mapping[int, int]) -> None:
        """`max_bytes` is the largest frame; a peer that sends a larger one is disconnected.

        Raises zmq.ZMQError if the address cannot be bound.
        """
        end = Endpoint.of(where)
        self._kind = kind
        self._context = zmq.Context()
        self._gate: _Gate | None = None
        self._acceptor: AcceptorProcess | None = None
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in ({zmq.MAXMSGSIZE: max_bytes, zmq.LINGER: 0} | dict(options)).items():
            self.socket.setsockopt(option, value)
        try:
            if end.keys is None:
                self.socket.bind(end.now())
            else:
                self._gate = _Gate(self._context, end.keys)
                self._acceptor = AcceptorProcess(
                    end.name, own_host(end.host), end.folder, max(_FRAMES_HELD * max_bytes, _LEAST_HELD)
                )
                _watch(self.socket)
                self.socket.curve_server = True
                self.socket.curve_publickey = end.keys.server_public
                self.socket.curve_secretkey = end.keys.server_secret
                self.socket.zap_domain = DOMAIN.encode()
                # Without this, peers would be admitted after the authenticator died.
                self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
                self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
                self.socket.bind(f"ipc://{self._acceptor.path}")
                self._acceptor.open()
                _announce(end, self._acceptor.address)
        except BaseException:
            self.close()
            raise

    @property
    def refused(self) -> int:
        """Peers refused for their key."""
        return self._gate.refused if self._gate is not None else 0

    def receive(self, most: int) -> list[zmq.Frame]:
        """The next message; of one with more than `most` frames the first ones and one more. Raises zmq.Again.

        ZeroMQ limits the size of a frame, not their number, and each costs far more memory here than on the wire.
        """
        frames = [self.socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more and len(frames) <= most:
            frames.append(self.socket.recv(copy=False))
        rest: list[int] = []
        last = frames[-1]
        while last.more:  # a call of the socket for each, and no second one: others wait for as long as this takes
            last = self.socket.recv(copy=False)
            rest.append(len(last))
        if self._acceptor is not None:
            # The first frame of a ROUTER is the name of the peer, which is not on the wire.
            sent = frames[1:] if self._kind == zmq.ROUTER else frames
            self._acceptor.received(int(frames[-1].get(zmq.SRCFD)), [*map(len, sent), *rest])
        return frames

    def close(self) -> None:
        """Close, after waiting for queued messages as long as the socket's LINGER says."""
        self.socket.close()
        if self._gate is not None:
            self._gate.stop()
        self._context.term()
        if self._acceptor is not None:
            self._acceptor.close()


class Link(Generic[S]):
    """A connecting socket that follows its peer to new addresses. `context` decides whether it is blocking or not."""

    def __init__(
        self, context: zmq.Context[S], kind: int, where: Endpoint | str, *, identity: str = "", **options: int
    ) -> None:
        """`options` of the socket by name, for instance SNDHWM=1000."""
        self._end = Endpoint.of(where)
        self.socket: S = context.socket(kind)
        for name, value in ({"LINGER": 0, "RECONNECT_IVL": 50, "RECONNECT_IVL_MAX": 1000} | options).items():
            self.socket.setsockopt(getattr(zmq, name), value)
        if identity:
            # Each socket has a name of its own: a restarted process must not be taken for its predecessor.
            self.socket.setsockopt(zmq.ROUTING_ID, f"{identity}/{uuid.uuid4().hex[:12]}".encode())
        if (keys := self._end.keys) is not None:
            _watch(self.socket)
            self.socket.curve_serverkey = keys.server_public
            self.socket.curve_publickey = keys.client_public
            self.socket.curve_secretkey = keys.client_secret
        self._address = ""
        self.follow()

    def __str__(self) -> str:
        return str(self._end)

    def follow(self) -> None:
        """Connect to the present address of the peer, if it has changed."""
        address = self._end.now()
        if address == self._address or not address:
            return
        if self._address:
            with contextlib.suppress(zmq.ZMQError):  # it was never reached
                self.socket.disconnect(self._address)
        self.socket.connect(address)
        self._address = address

    def close(self) -> None:
        self.socket.close()


class _Gate(ThreadAuthenticator):
    """Admits peers that prove to have the run's client key."""

    def __init__(self, context: zmq.Context[Any], keys: Keys) -> None:
        # Its own logger would write keys.
        quiet = log.getChild("gate")
        quiet.setLevel(logging.WARNING)
        super().__init__(context, log=quiet)
        self.refused = 0
        self._admitted = keys.client_public
        self.configure_curve_callback(DOMAIN, credentials_provider=self)
        self.start()

    def callback(self, domain: str, key: bytes) -> bool:
        admitted = key == self._admitted
        self.refused += not admitted
        return admitted


def own_host(wanted: str) -> str:
    """An address of this host: `wanted`, or for `auto` the source address of outgoing connections."""
    wanted = os.environ.get(HOST) or wanted
    if wanted != "auto":
        return wanted
    with plain.socket(plain.AF_INET, plain.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only chooses a route
            return cast(str, probe.getsockname()[0])
        except OSError:
            return plain.gethostbyname(plain.gethostname())


def _watch(socket: zmq.Socket[Any]) -> None:
    """Set heartbeats, without which the connection of a host that vanished would stay for hours."""
    for option, value in {
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS, zmq.HEARTBEAT_TIMEOUT: SILENT_MS, zmq.HEARTBEAT_TTL: SILENT_MS,
    }.items():  # fmt: skip
        socket.setsockopt(option, value)


def _announce(end: Endpoint, address: str) -> None:
    if end.announced is not None:
        place = direct(end.announced) if os.environ.get(RELAYED) else end.announced
        unfinished = place.with_name(f".{place.name}.{os.getpid()}")
        unfinished.write_text(address)
        unfinished.replace(place)
    log.info("%s listens on %s", end.name, address)


def direct(announced: Path) -> Path:
    """The file in which a relayed role announces itself."""
    return announced.with_name(f"{announced.name}.direct")
