"""Serves what this host fetched to other hosts: a WeightsServer (server.py) of the mirror's folder, in a thread."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from pathlib import Path

import zmq

from asyncrl.sockets import Endpoint
from asyncrl.weights.network.server import WeightsServer

log = logging.getLogger(__name__)


class Relay:
    def __init__(self, folder: Path, source: Endpoint) -> None:
        """`source` gives the keys and the kind of address. Raises zmq.ZMQError if it cannot listen."""
        self._end = Endpoint(source.name, f"ipc://{folder}/relay.{os.getpid()}")
        if source.keys is not None and source.announced is not None:
            name = source.announced.with_name(f"{source.announced.name}-{uuid.uuid4().hex}")
            self._end = Endpoint(source.name, announced=name, keys=source.keys, host=source.host)
        self.server = WeightsServer(folder, self._end, full_every=0, relays=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights relay", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where others find it; empty until it is announced."""
        return self._end.now()

    @property
    def ended(self) -> bool:
        """Whether it failed: its socket is closed, and nobody is answered here any more."""
        return not self._thread.is_alive()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10.0)
        if self._end.announced is not None:
            self._end.announced.unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            self.server.run(self._stop.is_set, 3600.0, lambda: None)
        except Exception:  # a file that cannot be opened, memory, a defect: the mirror sees `ended`
            log.exception("this host hands no weights on until its relay is started again; others fetch them elsewhere")
        finally:
            self.server.close()


def relay(folder: Path, source: Endpoint) -> Relay | None:
    """The relay; None, with a warning, if this host cannot listen."""
    with contextlib.suppress(FileNotFoundError):
        for left_over in folder.glob("relay.*"):
            left_over.unlink()
    try:
        return Relay(folder, source)
    except zmq.ZMQError as error:
        log.warning("this host hands no weights on: it cannot listen at %s: %s", source.host or folder, error)
        return None
