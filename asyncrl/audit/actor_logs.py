"""The lines of the actors' logs: what each put, and was told is stored (`asyncrl.actors.ack_log`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

Versions = tuple[tuple[int, int], ...]
"""(policy version, policy tokens of it), oldest first."""


@dataclass(frozen=True, slots=True)
class Ack:
    """One line of an actor's log."""

    branch: int
    group: int
    index: int
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class PutLine:
    """A trajectory that the actor was about to put."""

    branch: int
    group: int
    index: int
    attempt: int
    digest: str
    kind: str
    task_id: str
    reward: float
    rewards: Mapping[str, float]
    versions: Versions
    tokens: int
    turns: int
    env: str
    stop_reason: str
    seconds: float
    """That its episode took."""


@dataclass(frozen=True, slots=True)
class TurnLine:
    """A recorded turn of which the actor was told that it is stored."""

    branch: int
    group: int
    index: int
    attempt: int
    number: int
    form: str
    sampled: int
    oldest: int | None
    newest: int | None
    tokens: str | None

    def __str__(self) -> str:
        return (
            f"{self.form} {self.number} of attempt {self.attempt} at trajectory {self.branch}.{self.group}.{self.index}"
        )


@dataclass(frozen=True, slots=True)
class AckLines:
    actor: str
    acks: list[Ack]
    missing: list[int]
    """Numbers of missing lines."""
    unreadable: list[int]
    """Numbers, from 1, of lines that hold no acknowledgement."""
    puts: dict[int, PutLine] = field(default_factory=dict)
    """By number of the line."""
    turns: list[TurnLine] = field(default_factory=list)
    heads: dict[int, str] = field(default_factory=dict)
    """Digest of the log up to each line."""

    def until(self, later: AckLines) -> AckLines:
        """These acknowledgements with the announcements of a later reading."""
        return replace(self, puts=later.puts, heads=later.heads)


def read_acks(path: Path) -> AckLines:
    """An actor's log. An unfinished last line is not read: a power cut ended it, or it is being written."""
    log = AckLines(path.stem, [], [], [])
    expected, digest = 0, xxhash.xxh3_128()
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        digest.update(line + b"\n")
        try:
            n = _read_line(log, line)
        except (ValueError, TypeError, KeyError, AttributeError):
            log.unreadable.append(number)
            n = expected
        log.heads[n] = digest.hexdigest()
        log.missing.extend(range(expected, n))
        expected = n + 1
    return log


def read_logs(folder: Path) -> dict[str, AckLines]:
    """By actor."""
    return {path.stem: read_acks(path) for path in sorted(folder.glob("*.jsonl"))}


def _read_line(log: AckLines, line: bytes) -> int:
    """Adds what the line says to the log; returns its number."""
    fields: dict[str, Any] = json.loads(line.decode(errors="replace"))
    n = int(fields.pop("n"))
    if fields.keys() == {"put"}:
        log.puts[n] = PutLine(**_with_versions(fields["put"]))
    elif fields.keys() == {"turn"}:
        log.turns.append(TurnLine(**fields["turn"]))
    else:
        log.acks.append(Ack(**fields))
    return n


def _with_versions(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"versions": tuple((int(v), int(n)) for v, n in fields["versions"])}
