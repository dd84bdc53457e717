"""Answers of held-out tasks over the evaluations of a viewed run (`tracking.held_out`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from asyncrl.buffer.record import from_record
from asyncrl.errors import RunError
from asyncrl.tracking.rollouts import held_out
from asyncrl.tracking.rollouts.held_out import About
from asyncrl.tracking.rollouts.store import Key
from asyncrl.tracking.rollouts.text import TokenText
from asyncrl.trajectory import Trajectory
from asyncrl.view.detail import detail
from asyncrl.wire import WireError

LOOK_S = 1.0
MOST = 16
"""Evaluations side by side."""

Episode = tuple[str, int, int]
"""Set, number of the task, index."""


class HeldOut:
    """Any thread may call it; one is served at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked = float("-inf")
        self._sizes: dict[Key, int] = {}
        self._found: dict[Key, list[tuple[About, int]]] = {}
        self.trouble = ""
        """The last file that could not be read, and why."""

    def episodes(self) -> list[list[Any]]:
        """[set, task, index, task id, greedy, number of evaluations] of each episode of which there are answers."""
        self._look()
        counts: dict[Episode, int] = {}
        latest: dict[Episode, About] = {}
        for about, _ in (each for found in self._found.values() for each in found):
            key = about.set, about.task, about.index
            counts[key], latest[key] = counts.get(key, 0) + 1, about
        return [[*key, latest[key].task_id, latest[key].greedy, counts[key]] for key in sorted(counts)]

    def answers(self, episode: Episode, text: TokenText | None) -> list[dict[str, Any]]:
        """Its answers, one per evaluation in the order of the versions; of more than `MOST`, some from first to
        last."""
        self._look()
        there = [
            (key, about, place)
            for key, found in sorted(self._found.items(), key=lambda item: (item[0][1], item[0][0]))
            for about, place in found
            if (about.set, about.task, about.index) == episode
        ]
        return [self._answer(key, about, place, text) for key, about, place in spread(there)]

    def _answer(self, key: Key, about: About, place: int, text: TokenText | None) -> dict[str, Any]:
        evaluation = held_out.evaluations(self._folder)
        shown: dict[str, Any] = {"branch": about.branch, "due": about.due, "version": about.version}
        try:
            answer = held_out.answer(evaluation[key], place)
            if not answer.record:
                return shown | {"error": "This answer was too long to be kept (tracking.rollouts_mb)."}
            t = from_record(answer.payload)
        except (RunError, KeyError, ValueError, WireError) as error:
            return shown | {"error": f"This answer cannot be read: {error}"}
        made = detail(t, None, text) | {"from": "the kept answers", "note": ""}
        return shown | {"row": _row(about, t), "shown": made}

    def _look(self) -> None:
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        files = held_out.evaluations(self._folder)
        self._found = {key: found for key, found in self._found.items() if key in files}
        for key, path in files.items():
            try:
                size = path.stat().st_size
                if key not in self._found or self._sizes.get(key) != size:
                    self._found[key], self._sizes[key] = held_out.abouts(path), size
            except FileNotFoundError:  # removed just now
                continue
            except (RunError, OSError) as error:
                self.trouble = str(error)


def spread(found: list[Any]) -> list[Any]:
    """At most `MOST` of them, evenly, with the first and the last.

    >>> spread(list(range(31)))[:3], spread(list(range(31)))[-1], spread([1, 2])
    ([0, 2, 4], 30, [1, 2])
    """
    if len(found) <= MOST:
        return found
    return [found[round(i * (len(found) - 1) / (MOST - 1))] for i in range(MOST)]


def _row(about: About, t: Trajectory) -> dict[str, Any]:
    """The fields with which the page shows the row of a trajectory."""
    return {
        "task": t.task_id, "env": t.env, "reward": t.reward, "stop": t.stop_reason, "actor": t.actor,
        "attempt": t.attempt, "turns": t.turns, "tokens": sum(len(row) for row in t.rows),
        "policy_tokens": t.num_policy_tokens, "oldest": about.version[1], "newest": about.version[1],
    }  # fmt: skip
