"""The payloads as a witness: every stored byte decoded again and compared with the row about it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from asyncrl.audit.ledger import GroupRow, LedgerRows, TrajectoryRow
from asyncrl.audit.table import Check, apply
from asyncrl.buffer.ledger.group import version_counts
from asyncrl.buffer.ledger.storage.payloads import checksum
from asyncrl.buffer.record import from_record
from asyncrl.errors import RunError
from asyncrl.trajectory import Trajectory
from asyncrl.wire import WireError


class Located(Protocol):
    """A row that says where its bytes are."""

    @property
    def segment(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def bytes(self) -> int: ...


ReadPayload = Callable[[Located], bytes]

_OTHER_FILES = 256
"""Files that this process may have open besides the segments."""


class PayloadFiles:
    """The segments, all opened at once, so that one that a live buffer reclaims later can still be read."""

    def __init__(self, folder: Path) -> None:
        """Raises RunError if so many files may not be open."""
        self.folder = folder
        self._open: dict[int, int] = {}
        segments = [int(path.stem) for path in sorted(folder.glob("*.segment"))]
        _allow_open_files(len(segments) + _OTHER_FILES)
        for segment in segments:
            with suppress(FileNotFoundError):  # reclaimed just now
                self._find(segment)

    def read(self, row: Located) -> bytes:
        """The bytes where the row says they are, fewer where the file ends. Raises FileNotFoundError."""
        return os.pread(self._find(row.segment), row.bytes, row.start)

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def _find(self, segment: int) -> int:
        if segment not in self._open:
            self._open[segment] = os.open(self.folder / f"{segment:08d}.segment", os.O_RDONLY)
        return self._open[segment]


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise RunError(
            f"{count} files have to be open at once, and {hard} may be: raise the limit (ulimit -n {count})."
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class PayloadDiffers(RunError):
    """The stored bytes are not what the ledger recorded; says how."""


def payloads(ledger: LedgerRows, read: ReadPayload) -> Iterator[str]:
    return apply(PAYLOADS, ledger, read)


def needed_payloads_are_kept(ledger: LedgerRows, _: ReadPayload) -> Iterator[str]:
    """No payload was reclaimed while its group could still be used."""
    for number, group in ledger.groups.items():
        if not group.payload and group.state in ("in_flight", "waiting", "assigned"):
            yield f"group {number} is {group.state}, and its payload was reclaimed"


def payloads_are_as_recorded(ledger: LedgerRows, read: ReadPayload) -> Iterator[str]:
    """Every payload that is kept is the one that the ledger's row describes."""
    for number, group in ledger.groups.items():
        for row in ledger.members.get(number, ()) if group.payload else ():
            try:
                decoded(group, row, read)
            except PayloadDiffers as error:
                yield str(error)


PAYLOADS: tuple[Check, ...] = (needed_payloads_are_kept, payloads_are_as_recorded)


def decoded(group: GroupRow, row: TrajectoryRow, read: ReadPayload) -> Trajectory:
    """The trajectory from its bytes. Raises PayloadDiffers."""
    whose = f"the payload of trajectory {group.branch}.{row.group}.{row.index}"
    where = f"segment {row.segment}"
    try:
        record = read(row)
    except FileNotFoundError as error:
        raise PayloadDiffers(f"{whose} is missing: there is no {where}") from error
    if len(record) != row.bytes:
        raise PayloadDiffers(f"{whose} is missing: {where} ends before byte {row.start + row.bytes}")
    if checksum(record) != row.checksum:
        raise PayloadDiffers(f"{whose} was changed: the bytes in {where} have another checksum")
    try:
        t = from_record(record)
    except WireError as error:
        raise PayloadDiffers(f"{whose} cannot be decoded: {error}") from error
    compared = {
        "id": (str(t.id), f"{row.branch}.{row.group}.{row.index}"),
        "attempt": (t.attempt, row.attempt),
        "actor": (t.actor, row.actor),
        "task": (t.task_id, group.task_id),
        "versions": (version_counts(t), row.versions),
        "tokens": (t.num_tokens, row.tokens),
        "policy tokens": (t.num_policy_tokens, row.policy_tokens),
        "turns": (t.turns, row.turns),
        "reward": (t.reward, row.reward),
        "environment": (t.env, row.env),
        "stop reason": (t.stop_reason, row.stop_reason),
        "digest": (t.digest(), row.digest),
    }
    for what, (stored, recorded) in compared.items():
        if stored != recorded:
            raise PayloadDiffers(f"{whose} has {what} {stored}, the ledger says {recorded}")
    return t
