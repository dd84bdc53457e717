"""What lies where in a run's folder; nothing is read or written here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config


@dataclass(frozen=True, slots=True)
class RunPaths:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        """Weights of evaluation steps, of which the best stay (`eval.keep_best`); absent where none were written."""
        return self.path / "exports"

    @property
    def final(self) -> Path:
        """The figures of the set that is played after the end (`eval.final`), as `asyncrl eval --out` writes them."""
        return self.path / "final.json"

    @property
    def buffer(self) -> Path:
        """Folder of the live ledger, unless `buffer.dir` names another."""
        return self.path / "buffer"

    def ledger(self, config: Config) -> Path:
        """The live ledger's folder on the calling host."""
        return Path(os.path.expandvars(config.buffer.dir)) if config.buffer.dir else self.buffer

    @property
    def acks(self) -> Path:
        """`<actor>.jsonl`: the trajectories whose storage was acknowledged to each actor; a witness for the audit."""
        return self.path / "acks"

    @property
    def score_logs(self) -> Path:
        """`<scorer>.jsonl`: the scores that each scorer put, and was told are stored; a witness for the audit. Absent
        unless a teacher on servers gives scores."""
        return self.path / "scores"

    @property
    def teacher(self) -> Path:
        """Path and digest of the teacher that the run learns from, JSON; absent without one. Of one on servers, with
        what it said of a few tokens, by which it is known again."""
        return self.path / "teacher.json"

    @property
    def configs(self) -> Path:
        """The configs before the present one, `<number>.yaml`; absent while there was one only."""
        return self.path / "configs"

    @property
    def fresh(self) -> Path:
        """Holds the name of the checkpoint at which a new branch is to begin (`--fresh`, `--fork`), until a learner has
        begun it: whatever is killed in between, the next start does."""
        return self.path / "fresh"

    @property
    def spans(self) -> Path:
        """One JSON object per line (tracking/spans.py)."""
        return self.path / "spans.jsonl"

    @property
    def rollouts(self) -> Path:
        """Samples of what is trained on (`tracking.rollouts`); absent where none were written."""
        return self.path / "rollouts"

    @property
    def held_out(self) -> Path:
        """Answers of held-out tasks (`tracking.held_out`); absent where none were written."""
        return self.rollouts / "held_out"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def plan(self) -> Path:
        """What the last `asyncrl plan` of this run has played."""
        return self.path / "plan.json"

    @property
    def plots(self) -> Path:
        return self.path / "plots"
