"""A process in front of the role: it accepts tcp connections, and passes on those of peers that show the keys.

    peer ──tcp──> acceptor ──ipc──> socket of ZeroMQ, which decides about the keys (CURVE) ──> role

ZeroMQ takes every connection, so that strangers without keys could use up the open files of a role, and with them its
disk. This process takes them instead, and has no files to lose. It keeps at most `PENDING` connections whose peer has
not been admitted yet: with one more, the one that has been silent for longest is closed.

ZeroMQ gathers the parts of a message until its last one, and neither their number nor their sum has a bound. So this
process counts what an admitted peer has sent, and the role reports what it has received (`Listener.receive`): a peer
that is more than `most` bytes ahead of the role is not read from, and is closed if that lasts. The process does not
interpret what it carries, beyond the first byte of a peer, the word with which ZeroMQ admits it, and the length of each
frame.

`AcceptorProcess` starts this file by its path: it uses the standard library alone, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

PENDING = 128
SILENT_S = 3.0
"""Seconds until the first byte of a peer ..."""
ADMITTED_S = 10.0
"""... and until it has shown its keys."""
REPORT_S = 10.0
DRAIN_S = 2.0
"""Seconds for which replies are still handed over when the role has ended."""
SPARE_FILES = 32
CHUNK_BYTES = 1 << 18
AT_ONCE = 64
SIGNATURE = 0xFF
"""The first byte of every peer that speaks ZMTP."""
READY = b"\x05READY"
"""The command with which the socket admits a peer; the 234 bytes before it are a greeting and random bytes."""
HEAD_BYTES = 320
GREETING_BYTES = 64
LARGE = 0x02
"""Flag of a frame whose length has eight bytes."""
FRAME_BYTES = 2048
"""Bytes that each frame counts beside those on the wire, since ZeroMQ and the role need memory and time for it."""
LEAK_BYTES = 1024
"""Bytes taken off each peer's count per second: more than its heartbeats, which the role never reports."""
STUCK_S = 15.0
"""Seconds for which a peer may stay more than `most` bytes ahead of the role; then it is closed."""
TOTAL = 4
"""All peers together may be this many times `most` ahead; beyond that, the peer that is furthest ahead is closed."""
TAKEN = struct.Struct("<6sQ")
"""A report of the role on standard input: the address of a connection, and the bytes newly received from it."""


@dataclass(slots=True)
class Frames:
    """Counts the frames that begin in a peer's bytes."""

    skip: int = GREETING_BYTES
    head: bytes = b""

    def begin(self, data: bytes) -> int:
        at, count = 0, 0
        if self.head:
            data, self.head = self.head + data, b""
        while at + self.skip < len(data):
            at += self.skip
            size = 9 if data[at] & LARGE else 2
            if at + size > len(data):
                self.skip, self.head = 0, data[at:]
                return count
            self.skip = size + int.from_bytes(data[at + 1 : at + size], "big")
            count += 1
        self.skip -= len(data) - at
        return count


@dataclass(eq=False, slots=True)
class End:
    """One socket of a connection, and what is still to be written to it."""

    socket: socket.socket
    pair: Pair
    unsent: bytes | memoryview = b""
    mask: int = 0
    """The epoll events that it waits for."""


@dataclass(eq=False, slots=True)
class Pair:
    """A connection: the peer's end and, once the peer has sent its first byte, the role's end."""

    address: str
    since: float
    peer: End | None = None
    role: End | None = None
    head: bytearray | None = field(default_factory=bytearray)
    """The first bytes that the role sent; None once the peer is admitted."""
    name: bytes = b""
    """Address of the role's end, by which the role's reports name the connection."""
    frames: Frames = field(default_factory=Frames)
    held: int = 0
    """How far an admitted peer is ahead of the role: bytes, and FRAME_BYTES for each frame."""
    stuck: float = 0.0
    """When reading from the peer stopped because of `held`, by time.monotonic(); 0: it is read from."""


class Acceptor:
    def __init__(self, listening: socket.socket, path: str, alive: int, most: int) -> None:
        """`path`: the role's own socket. `alive`: a pipe that ends with the role's process, on which the role reports
        what it has received. `most`: bytes that a peer may be ahead of that."""
        self._listening, self._path, self._alive, self._most_held = listening, path, alive, most
        self._named: dict[bytes, Pair] = {}
        """Connections to the role, by the address of the role's end."""
        self._held, self._said, self._leaked_at = 0, b"", 0.0
        self._endless: Counter[str] = Counter()
        self._epoll = select.epoll()
        self._ends: dict[int, End] = {}
        self._pending: dict[Pair, None] = {}
        """Connections that are not admitted yet, oldest first."""
        self._pairs = 0
        self._most = (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES) // 2
        """Most connections: each takes two files here, and one in the role's process."""
        self._closed: Counter[str] = Counter()
        self._full = 0
        self._report_at = 0.0
        self._until = float("inf")

    def run(self, parent: int) -> None:
        self._listening.setblocking(False)
        self._epoll.register(self._listening, select.EPOLLIN)
        self._epoll.register(self._alive, select.EPOLLIN)
        while time.monotonic() < self._until and (self._pairs or self._until == float("inf")):
            for file, event in self._epoll.poll(0.5):
                self._handle(file, event)
            now = time.monotonic()
            self._close_overdue(now)
            self._close_stuck(now)
            self._report(now)
            if os.getppid() != parent:
                self._leave()

    def _handle(self, file: int, event: int) -> None:
        if file == self._listening.fileno():
            self._accept()
        elif file == self._alive:
            self._listen()
        elif (end := self._ends.get(file)) is not None:
            try:
                # The event may be of a connection that was closed just before this one got its file's number.
                if event & end.mask & select.EPOLLOUT:
                    self._write(end)
                if event & ~select.EPOLLOUT and end.mask & select.EPOLLIN:
                    self._read(end)
            except BlockingIOError:
                return
            except OSError:  # the connection broke
                self._close(end.pair)

    def _leave(self) -> None:
        """Accepts no more, since the role's process has ended, and still hands over its last replies."""
        if self._until == float("inf"):
            self._until = time.monotonic() + DRAIN_S
            self._epoll.unregister(self._listening)
            with contextlib.suppress(OSError):
                self._epoll.unregister(self._alive)
            self._listening.close()
            for pair in [pair for pair in self._pending if pair.role is None]:
                self._close(pair)

    def _listen(self) -> None:
        """Reads the role's reports, and subtracts what it received from the count of each peer."""
        said = os.read(self._alive, TAKEN.size << 10)
        if not said:
            self._leave()
        self._said += said
        whole = len(self._said) // TAKEN.size * TAKEN.size
        for name, taken in TAKEN.iter_unpack(self._said[:whole]):
            if (pair := self._named.get(name)) is not None:
                self._hold(pair, -taken)
        self._said = self._said[whole:]

    def _hold(self, pair: Pair, more: int) -> None:
        before, pair.held = pair.held, max(0, pair.held + more)
        self._held += pair.held - before
        if stuck := pair.held > self._most_held:
            pair.stuck = pair.stuck or time.monotonic()
        if not stuck and pair.stuck:
            pair.stuck = 0.0
            self._settle(pair)

    def _close_stuck(self, now: float) -> None:
        if now - self._leaked_at < 1.0:
            return
        leak, self._leaked_at = int(LEAK_BYTES * min(now - self._leaked_at, 60.0)), now
        for pair in [pair for pair in self._named.values() if pair.held]:
            self._hold(pair, -leak)
            if pair.stuck and now - pair.stuck > STUCK_S:
                self._close_endless(pair)

    def _close_endless(self, pair: Pair) -> None:
        self._endless[pair.address] += 1
        self._close(pair)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                taken, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:  # the peer has left already, or no file is free: one is made free
                self._make_room()
                return
            taken.setblocking(False)
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._pairs >= self._most - 1 or len(self._pending) >= PENDING:
                self._make_room()
            if self._pairs >= self._most - 1:
                self._full += 1
                taken.close()
                continue
            pair = Pair(str(address[0]), time.monotonic())
            pair.peer = self._watch(taken, pair)
            self._pending[pair] = None
            self._pairs += 1

    def _make_room(self) -> None:
        """Closes the oldest connection without a first byte, or else the oldest of the address that has the most."""
        silent = next((pair for pair in self._pending if pair.role is None), None)
        if silent is None and self._pending:
            ((busiest, _),) = Counter(pair.address for pair in self._pending).most_common(1)
            silent = next(pair for pair in self._pending if pair.address == busiest)
        if silent is not None:
            self._closed[silent.address] += 1
            self._close(silent)

    def _close_overdue(self, now: float) -> None:
        for pair in list(self._pending):
            if now - pair.since > (SILENT_S if pair.role is None else ADMITTED_S):
                self._closed[pair.address] += 1
                self._close(pair)

    def _watch(self, watched: socket.socket, pair: Pair) -> End:
        end = End(watched, pair, mask=select.EPOLLIN)
        self._ends[watched.fileno()] = end
        self._epoll.register(watched, end.mask)
        return end

    def _read(self, end: End) -> None:
        pair = end.pair
        data = end.socket.recv(CHUNK_BYTES)
        # An end is read only while the other has taken all: when it ends, nothing is left to hand over.
        if not data or (pair.role is None and not self._open(pair, data[0])):
            self._close(pair)
            return
        other = pair.role if end is pair.peer else pair.peer
        assert other is not None
        if end is pair.peer:
            self._count(pair, data)
        elif pair.head is not None:
            self._look(pair, data)
        sent = _send(other.socket, data)
        if sent < len(data):
            other.unsent = memoryview(data)[sent:]
        if other.unsent or pair.stuck:
            self._settle(pair)
        if self._held > TOTAL * self._most_held:
            self._close_endless(max(self._named.values(), key=lambda each: each.held))

    def _count(self, pair: Pair, data: bytes) -> None:
        frames = pair.frames.begin(data)
        if pair.head is None:
            self._hold(pair, len(data) + FRAME_BYTES * frames)

    def _open(self, pair: Pair, first: int) -> bool:
        """Connects a peer to the role; False if its first byte is not ZMTP's, or the role has no room now."""
        if first != SIGNATURE:
            self._closed[pair.address] += 1
            return False
        role = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        role.setblocking(False)
        try:
            role.bind("")  # the system chooses a name
            role.connect(self._path)
        except OSError:  # it ends, or its backlog is full: the peer comes again
            role.close()
            return False
        pair.role, pair.name = self._watch(role, pair), role.getsockname()
        self._named[pair.name] = pair
        return True

    def _look(self, pair: Pair, data: bytes) -> None:
        """Learns from the role's first bytes whether it admitted the peer."""
        assert pair.head is not None
        pair.head += data[:HEAD_BYTES]
        if READY in pair.head:
            pair.head = None
            del self._pending[pair]

    def _write(self, end: End) -> None:
        end.unsent = end.unsent[_send(end.socket, end.unsent) :]
        if not end.unsent:
            self._settle(end.pair)

    def _settle(self, pair: Pair) -> None:
        """Reads from each end only while nothing is left to write to the other."""
        peer, role = pair.peer, pair.role
        assert peer is not None
        assert role is not None
        for end, other in ((peer, role), (role, peer)):
            reading = 0 if other.unsent or (pair.stuck and end is peer) else select.EPOLLIN
            self._wait_for(end, reading | (select.EPOLLOUT if end.unsent else 0))

    def _wait_for(self, end: End, mask: int) -> None:
        if mask == end.mask:
            return
        if not mask:  # a registered socket reports EPOLLHUP and EPOLLERR under any mask, again and again
            self._epoll.unregister(end.socket)
        elif not end.mask:
            self._epoll.register(end.socket, mask)
        else:
            self._epoll.modify(end.socket, mask)
        end.mask = mask

    def _close(self, pair: Pair) -> None:
        for end in (pair.peer, pair.role):
            if end is not None and end.socket.fileno() >= 0:
                del self._ends[end.socket.fileno()]
                end.socket.close()
        self._pairs -= 1
        self._held -= pair.held
        self._pending.pop(pair, None)
        self._named.pop(pair.name, None)

    def _report(self, now: float) -> None:
        """Reports what was closed, to the role's log."""
        if now < self._report_at or not (self._closed or self._full or self._endless):
            return
        self._report_at = now + REPORT_S
        if self._closed:
            ((address, _),) = self._closed.most_common(1)
            print(
                f"{self._closed.total()} connections were closed because they did not show the run's keys, most of "
                f"them from {address}: something else than this run connects to it",
                flush=True,
            )
        if self._endless:
            ((address, _),) = self._endless.most_common(1)
            print(
                f"{self._endless.total()} connections were closed because they sent more than {self._most_held >> 20} "
                f"MiB of which nothing could be received yet, most of them from {address}: a message without an end",
                flush=True,
            )
        if self._full:
            print(
                f"{self._full} connections were refused: {self._pairs} peers are connected, as many as the limit of "
                f"open files allows, which is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (ulimit -n): raise it",
                flush=True,
            )
        self._closed.clear()
        self._endless.clear()
        self._full = 0


def _send(to: socket.socket, data: bytes | memoryview) -> int:
    """The number of bytes that need not be sent again."""
    try:
        return to.send(data)
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        if to.family != socket.AF_UNIX:
            raise
        return len(data)  # the role has closed, and what it said before is still to be read


if __name__ == "__main__":
    # Signals are ignored: this process ends after the role's, which may send replies until its end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listening, most, path = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    with contextlib.suppress(BrokenPipeError):  # the role has ended, and nobody reads the reports
        Acceptor(listening, path, sys.stdin.fileno(), most).run(os.getppid())
    # A role that was killed has left its socket.
    for remove, left in ((os.unlink, path), (os.rmdir, os.path.dirname(path))):
        with contextlib.suppress(OSError):
            remove(left)
