"""Cuts, silences and slows the network between the roles of one host: a relay carries every connection.

    role that connects ──tcp──> relay ──tcp──> role that listens
         looks in RUN/private/buffer              announces itself in RUN/private/buffer.direct (sockets.RELAYED)

The relay does not interpret the data, which CURVE encrypts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.chaos.injector import Injector
from asyncrl.chaos.plan import Fault
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder, replace
from asyncrl.sockets import RELAYED

LOOK_S = 0.02
CHUNK_BYTES = 1 << 16
LATE_S = (0.005, 0.05)
LOST_S, LOST_SHARE = 0.5, 0.05
"""A slow network: the range of a chunk's delay; the delay after a lost packet, and the share of chunks that have it."""
END_S = 10.0
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class _Edge:
    """All connections to one listening role."""

    mode: str = ""
    audible: asyncio.Event = field(default_factory=asyncio.Event)
    target: tuple[str, int] = ("", 0)
    """Address of the role itself."""
    address: str = ""
    """Address of its relay."""
    open: set[asyncio.StreamWriter] = field(default_factory=set)
    serving: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.audible.set()


class Relay(Injector):
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._edges: dict[str, _Edge] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)

    def changed(self, config: Config) -> Config:
        """The config with sockets and weights over TCP in place of files."""
        host, channel = config.launch.host or LOOPBACK, config.weights.channel
        return config.model_copy(
            update={
                "launch": config.launch.model_copy(update={"host": host}),
                "weights": config.weights.model_copy(update={"channel": "zmq" if channel == "shm" else channel}),
            }
        )

    @property
    def environment(self) -> Mapping[str, str]:
        return {RELAYED: "1"}

    def open(self, run: RunFolder) -> None:
        self._thread.start()
        self._loop.call_soon_threadsafe(self._follow, run.private)

    def ready(self, fault: Fault) -> bool:
        return bool(self._edges.get(_name(fault), _Edge()).address)

    def begin(self, fault: Fault) -> str:
        self._set(_name(fault), fault.mode)
        return ""

    def end(self, fault: Fault) -> None:
        self._set(_name(fault), "")

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_S)
        self._loop.close()

    def _set(self, name: str, mode: str) -> None:
        def act() -> None:
            edge = self._edges[name]
            edge.mode = mode
            if mode == "silent":
                edge.audible.clear()
            else:
                edge.audible.set()
            for writer in [*edge.open] if mode == "cut" else ():
                writer.transport.abort()

        self._loop.call_soon_threadsafe(act)

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, folder: Path) -> None:
        """Relays every role that announces itself, also after its restart and in a resumed launch."""
        for file in folder.glob("*.direct"):
            with contextlib.suppress(OSError):  # the launch has ended meanwhile, and its folder is gone
                self._announce(file)
        self._loop.call_later(LOOK_S, self._follow, folder)

    def _announce(self, file: Path) -> None:
        shown = file.with_suffix("")
        host, _, port = file.read_text().removeprefix("tcp://").rpartition(":")
        edge = self._edges.setdefault(shown.name, _Edge())
        edge.target = (host, int(port))
        if edge.serving is None:
            edge.serving = self._loop.create_task(self._serve(edge, host))
        elif edge.address and not shown.exists():
            replace(shown, edge.address)

    async def _serve(self, edge: _Edge, host: str) -> None:
        async with await asyncio.start_server(functools.partial(self._carry, edge), host, 0) as server:
            edge.address = f"tcp://{host}:{server.sockets[0].getsockname()[1]}"
            await server.serve_forever()

    async def _carry(self, edge: _Edge, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        try:
            if edge.mode == "cut":
                return
            far_reader, far_writer = await asyncio.open_connection(*edge.target)
            ends.add(far_writer)
            edge.open |= ends
            directions = [
                asyncio.ensure_future(self._pass(edge, reader, far_writer)),
                asyncio.ensure_future(self._pass(edge, far_reader, writer)),
            ]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
                await asyncio.gather(*directions, return_exceptions=True)
        except OSError:  # the role does not listen now
            pass
        finally:
            edge.open -= ends
            for end in ends:
                end.transport.abort()

    async def _pass(self, edge: _Edge, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                await edge.audible.wait()
                if edge.mode == "slow":
                    lost = self._rng.random() < LOST_SHARE
                    await asyncio.sleep(LOST_S if lost else self._rng.uniform(*LATE_S))
                writer.write(chunk)
                await writer.drain()


def _name(fault: Fault) -> str:
    return fault.target.rpartition(" ")[2]
