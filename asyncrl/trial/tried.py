"""One episode as `asyncrl try` shows it: made of the trajectory that a run would train on, or of a served model's chat.

A trajectory holds the text as the policy saw it, chat template included: that is what is shown.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from asyncrl.actors.episodes.chat import ChatResult
from asyncrl.data.base import Message
from asyncrl.trajectory import StopReason, Trajectory, TurnRecord

Call = tuple[str, str]
"""A tool call's name and arguments, as text. The name is empty where the call could not be parsed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one side contributed: context, or a turn of the policy."""

    text: str
    policy: bool = False
    speaker: str = "context"
    content: str = ""
    """A turn's text as the run reads it, without tool calls and stop token."""
    calls: tuple[Call, ...] = ()
    tokens: int | None = None
    """None: unknown, as with an endpoint that does not count them."""
    record: TurnRecord | None = None
    """What a turn cost."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One episode that was played to its end."""

    task: str
    reward: float
    rewards: Mapping[str, float]
    metrics: Mapping[str, float]
    stop_reason: StopReason
    pieces: tuple[Piece, ...]
    seconds: float
    prefix_breaks: int | None
    """None: unknown, since an endpoint gives no tokens."""
    turn_count: int
    """As `env.max_turns` counts: a request of an agent is a turn, however many choices it asks for."""

    @property
    def turns(self) -> list[Piece]:
        """What the policy said: a turn each, or a choice each."""
        return [piece for piece in self.pieces if piece.policy]

    @property
    def said(self) -> str:
        """The word for one of `turns`."""
        return "turn" if len(self.turns) <= self.turn_count else "choice"


class Text(Protocol):
    """The part of a renderer that is used here."""

    def decode(self, ids: Sequence[int]) -> str: ...
    def parse(self, sampled_ids: Sequence[int]) -> Message: ...


def of_trajectory(trajectory: Trajectory, text: Text, prefix_breaks: int) -> Tried:
    pieces: list[Piece] = []
    records = list(trajectory.turn_records)
    for number, row in enumerate(trajectory.rows):
        speaker = "context" if number == 0 else f"row {number + 1}"
        bounds = [0, *(np.flatnonzero(np.diff(row.mask)) + 1).tolist(), len(row)]
        for begin, end in itertools.pairwise(bounds):
            ids = row.token_ids[begin:end].tolist()
            if not row.mask[begin]:
                pieces.append(Piece(text.decode(ids), speaker=speaker, tokens=len(ids)))
                continue
            read, record = text.parse(ids), _record(records, len(ids))
            said = _text(read.get("content")), calls_of(read)
            pieces.append(Piece(text.decode(ids), True, "policy", *said, len(ids), record))
    return Tried(
        trajectory.task_id, trajectory.reward, trajectory.rewards, trajectory.metrics, trajectory.stop_reason,
        tuple(pieces), trajectory.timings["total"], prefix_breaks, trajectory.turns,
    )  # fmt: skip


def of_chat(result: ChatResult, seconds: float) -> Tried:
    records = iter(result.turn_records)
    pieces = [_spoken(message, lambda: next(records, None)) for message in result.messages]
    return Tried(
        result.task_id, result.reward, result.rewards, {}, result.stop_reason, tuple(pieces), seconds, None,
        sum(piece.policy for piece in pieces),
    )  # fmt: skip


def calls_of(message: Message) -> tuple[Call, ...]:
    """The tool calls of a message of the policy."""
    return tuple(
        (str(call["function"].get("name") or ""), _text(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    )


def _record(records: list[TurnRecord], sampled: int) -> TurnRecord | None:
    """Takes the record of a turn of `sampled` tokens out of `records`: in an agent's episode with branches the order of
    the turns is not that of the rows."""
    for number, record in enumerate(records):
        if record.sampled == sampled:
            return records.pop(number)
    return None


def _spoken(message: Message, record: Callable[[], TurnRecord | None]) -> Piece:
    content, role = _text(message.get("content")), str(message.get("role"))
    if role != "assistant":
        return Piece(content, speaker=role)
    cost = record()
    counted = cost.sampled if cost and cost.sampled else None
    return Piece(content, True, "policy", content, calls_of(message), counted, cost)


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
