"""What this actor put and was told is stored: evidence for the audit that only the actor writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.process.numbered_log import NumberedLog
from asyncrl.trajectory import CONTEXT, Lease, Row, Trajectory, episode_seconds
from asyncrl.trajectory.turns import Recorded, RecordedSample


class AckLog(NumberedLog):
    """`acks/<actor>.jsonl`: lines that are numbered from 0 and appended in one write each, never rewritten.

        {"n": 0, "put": {...}}          before a trajectory is put: what it is, in the numbers that the ledger keeps
        {"n": 1, "branch": ...}         behind the acknowledgement of a training trajectory
        {"n": 2, "turn": {...}}         behind the acknowledgement of a recorded turn

    A trajectory carries the place of its line and a digest of the log up to it, and the ledger keeps both: so every
    trajectory in the ledger has a line, and the audit notices one that is removed or changed later. A killed actor may
    lack the acknowledgements behind its last put. Numbering continues through the actor's restarts.
    """

    async def announced(self, t: Trajectory) -> Trajectory:
        """The trajectory with the place of its line, which the log keeps when this returns."""
        announced = self.announce(t)
        await self.flush()
        return announced

    def announce(self, t: Trajectory) -> Trajectory:
        about = {"kind": t.kind, "task_id": t.task_id, "env": t.env, "turns": t.turns, "stop_reason": t.stop_reason}
        rewards = {"reward": float(t.reward), "rewards": {name: float(value) for name, value in t.rewards.items()}}
        tokens = {"tokens": t.num_tokens, "versions": _versions(t.rows)}
        fields = _named(t) | about | rewards | tokens
        self._append({"put": fields | {"seconds": episode_seconds(t)}})
        return replace(t, logged=self._last)

    def write(self, t: Trajectory) -> None:
        """The buffer acknowledged a training trajectory."""
        self._append(_named(t))

    def recorded(self, lease: Lease, turn: Recorded) -> None:
        """The buffer acknowledged a recorded turn."""
        sampled: dict[str, Any] = {"sampled": 0, "oldest": None, "newest": None, "tokens": None}
        if isinstance(turn, RecordedSample):
            oldest, newest = turn.span
            sampled = {"sampled": len(turn.token_ids), "oldest": oldest, "newest": newest, "tokens": turn.digest()}
        self._append({"turn": _place(lease) | {"number": turn.place[0], "form": turn.form} | sampled})


def _named(t: Trajectory) -> dict[str, Any]:
    return {**_place((t.id, t.attempt)), "digest": t.digest()}


def _place(lease: Lease) -> dict[str, Any]:
    id, attempt = lease
    return {"branch": id.branch, "group": id.group, "index": id.index, "attempt": attempt}


def _versions(rows: tuple[Row, ...]) -> list[list[int]]:
    """[version, policy tokens of it], oldest first."""
    versions = np.concatenate([row.versions for row in rows])
    values, counts = np.unique(versions[versions != CONTEXT], return_counts=True)
    return [[int(v), int(n)] for v, n in zip(values, counts, strict=True)]
