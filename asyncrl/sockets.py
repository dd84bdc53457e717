"""The one place where sockets are made: who may connect, how roles find each other, how large a message may be.

    one host       ipc:// in a folder that only its owner can read
    several hosts  tcp:// with CURVE, and only for who has the run's keys (keys.py): others get nothing, not an error

A role that listens on tcp takes a free port and announces it in the run folder. Who connects reads that, and reads it
again while it gets no answer: a role that was started anew, even on another host, is found.
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

from asyncrl.errors import RunError
from asyncrl.keys import Keys

log = logging.getLogger(__name__)

HOST = "ASYNCRL_HOST"
"""Environment variable: the address of this host on which a role listens, where a launcher knows it better."""
RELAYED = "ASYNCRL_RELAYED"
"""Environment variable: a relay (asyncrl/chaos/faults/network.py) stands between listener and peers. It reads the
listener's address beside the place where peers look, and announces itself there."""
HEARTBEAT_MS = 5_000
SILENT_MS = 20_000
"""A tcp peer that is not heard of for so long is gone, and its connection is closed."""
DOMAIN = "asyncrl"
_LOCAL = ("ipc://", "inproc://")
S = TypeVar("S", bound=zmq.Socket[Any])


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a role of a run listens."""

    name: str
    address: str = ""
    """ipc:// ...; of tcp empty, because the role announces it."""
    announced: Path | None = None
    """The file that says it."""
    keys: Keys | None = None
    host: str = ""
    """Where the role listens if it is started on this host."""

    @classmethod
    def of(cls, where: Endpoint | str) -> Endpoint:
        """An address written out. Raises RunError for tcp, which needs keys."""
        if isinstance(where, Endpoint):
            return where
        if not where.startswith(_LOCAL):
            raise RunError(f"{where} is no address of this host; others need the run's keys: use RunFolder.address.")
        return cls(where, where)

    def now(self) -> str:
        """The address; empty while the role has not announced one."""
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
        """`max_bytes`: of one frame; a peer that sends more is disconnected. Raises zmq.ZMQError when the address
        cannot be bound."""
        end = Endpoint.of(where)
        self._context = zmq.Context()
        self._gate: _Gate | None = None
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in ({zmq.MAXMSGSIZE: max_bytes, zmq.LINGER: 0} | dict(options)).items():
            self.socket.setsockopt(option, value)
        try:
            if end.keys is None:
                self.socket.bind(end.now())
            else:
                self._gate = _Gate(self._context, end.keys)
                _watch(self.socket)
                self.socket.curve_server = True
                self.socket.curve_publickey = end.keys.server_public
                self.socket.curve_secretkey = end.keys.server_secret
                self.socket.zap_domain = DOMAIN.encode()
                # Without this a gate that died would leave the door open.
                self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
                self.socket.bind(f"tcp://{own_host(end.host)}:*")
                _announce(end, self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        except BaseException:
            self.close()
            raise

    @property
    def refused(self) -> int:
        """Peers that were turned away for their key."""
        return self._gate.refused if self._gate is not None else 0

    def close(self) -> None:
        """Waits for what is queued as long as the socket's LINGER says."""
        self.socket.close()
        if self._gate is not None:
            self._gate.stop()
        self._context.term()


class Link(Generic[S]):
    """A connecting socket that follows its peer. `socket` is as `context` makes it, blocking or of asyncio."""

    def __init__(
        self, context: zmq.Context[S], kind: int, where: Endpoint | str, *, identity: str = "", **options: int
    ) -> None:
        """`options`: by name, for instance SNDHWM=1000."""
        self._end = Endpoint.of(where)
        self.socket: S = context.socket(kind)
        for name, value in ({"LINGER": 0, "RECONNECT_IVL": 50, "RECONNECT_IVL_MAX": 1000} | options).items():
            self.socket.setsockopt(getattr(zmq, name), value)
        if identity:
            # A name of its own for each socket: a restarted process must not be taken for its predecessor's connection.
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
        """Connects to where the peer is now; does nothing while that is the same."""
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
    """Admits who proves to have the client's key of the run."""

    def __init__(self, context: zmq.Context[Any], keys: Keys) -> None:
        # Its own logger names keys.
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
    """An address of this host: `wanted`, or for `auto` the one from which others are reached."""
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
    """A host that vanishes says nothing: without heartbeats its connection would stay for hours."""
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
    """Where a role that is relayed announces itself."""
    return announced.with_name(f"{announced.name}.direct")
