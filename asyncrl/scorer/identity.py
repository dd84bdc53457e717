"""By what a teacher on servers is known again: what it said of a few tokens, since nobody outside sees its weights.

The first scorer of a run writes that down, with a digest of it, which names the teacher from then on. Every other
start, every server, and every group afterwards must find the same up to what batching and rounding change.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import RunError
from asyncrl.scorer.dialects import TeacherUnusable

TOLERANCE = 0.1
"""Nats, mean over the tokens: between bfloat16 kernels of one model it is below 0.05, between two models above 1."""


@dataclass(frozen=True, slots=True)
class Probe:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Logprobs of each token but the first."""

    @property
    def digest(self) -> str:
        said = json.dumps([self.tokens, [f"{x:.4f}" for x in self.logprobs]])
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def differs(self, other: Sequence[float]) -> float:
        """Mean difference of the logprobs, in nats."""
        return sum(abs(a - b) for a, b in zip(self.logprobs, other, strict=True)) / len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Identity:
    """The run's teacher."""

    probe: Probe
    digest: str

    def check(self, logprobs: Sequence[float], where: str) -> None:
        """Raises TeacherUnusable for another teacher than the run's."""
        if (apart := self.probe.differs(logprobs)) > TOLERANCE:
            raise TeacherUnusable(
                f"{where} serves another teacher than the one that this run learns from ({self.digest[:12]}): the "
                f"logprobs of {len(logprobs)} tokens differ by {apart:.2f} nats a token. Serve the first one again, or "
                "begin another run with this one."
            )


def of_run(file: Path, path: str, found: Probe) -> Identity:
    """The teacher that `file` names, which this call writes if no start before it did. Raises RunError."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    content = {"path": path, "digest": found.digest, "tokens": found.tokens, "logprobs": found.logprobs}
    unfinished.write_text(json.dumps(content, indent=1))
    try:
        os.link(unfinished, file)  # several scorers may start at once: the first one decides
    except FileExistsError:
        pass
    finally:
        unfinished.unlink()
    try:
        read = json.loads(file.read_text())
        known = Probe(tuple(map(int, read["tokens"])), tuple(map(float, read["logprobs"])))
        digest = str(read["digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} is damaged ({error}): it names the teacher that the run learns from. Restore it; if the servers "
            "serve that one for certain, remove the file and start a new run."
        ) from error
    if known.tokens != found.tokens:
        raise RunError(
            f"{file} is of another tokenizer than model.path: the run began with another one. Put model.path back."
        )
    return Identity(known, digest)
