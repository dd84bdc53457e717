"""The lines of the scorers' logs: what each put, and was told is stored (`asyncrl.scorer.score_log`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash


@dataclass(frozen=True, slots=True)
class ScoredLine:
    """Scores that the scorer was told are stored."""

    group: int
    attempt: int
    digest: str
    branch: int
    """The newest of the groups that this scorer had put by then: the run was on it, or on a later one."""


@dataclass(frozen=True, slots=True)
class ScorePut:
    """Scores that the scorer was about to put."""

    group: int
    attempt: int
    digest: str
    branch: int
    teacher: str
    trajectories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScorerLines:
    scorer: str
    stored: list[ScoredLine] = field(default_factory=list)
    puts: dict[int, ScorePut] = field(default_factory=dict)
    """By number of the line."""
    heads: dict[int, str] = field(default_factory=dict)
    """Digest of the log up to each line."""
    damaged: list[str] = field(default_factory=list)
    """What is wrong with its lines."""


def read_score_log(path: Path) -> ScorerLines:
    """A scorer's log. An unfinished last line is not read: a power cut ended it, or it is being written."""
    log, digest, branch = ScorerLines(path.stem), xxhash.xxh3_128(), 0
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1]):
        digest.update(line + b"\n")
        log.heads[number] = digest.hexdigest()
        try:
            n = _read_line(log, line, branch)
        except (ValueError, TypeError, KeyError, AttributeError):
            log.damaged.append(f"line {number + 1} is no line of a scorer")
        else:
            branch = max(branch, log.puts[n].branch) if n in log.puts else branch
            if n != number:
                log.damaged.append(f"line {number + 1} has the number {n}: the lines are numbered from 0 without gaps")
    return log


def read_score_logs(folder: Path) -> dict[str, ScorerLines]:
    """By scorer."""
    return {path.stem: read_score_log(path) for path in sorted(folder.glob("*.jsonl"))}


def _read_line(log: ScorerLines, line: bytes, branch: int) -> int:
    fields: dict[str, Any] = json.loads(line.decode(errors="replace"))
    n = int(fields.pop("n"))
    if fields.keys() == {"put"}:
        said = fields["put"]
        log.puts[n] = ScorePut(**(said | {"trajectories": tuple(said["trajectories"])}))
    else:
        log.stored.append(ScoredLine(**fields["stored"], branch=branch))
    return n
