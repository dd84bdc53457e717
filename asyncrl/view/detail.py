"""One trajectory as the page shows it: text by token, numbers by token, parts of the conversation. Pure.

The text and what was sampled come from the payload, or from a sample where that is gone; what the loss made of each
token comes from a sample of the batch (`tracking.rollouts`), and elsewhere is not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from asyncrl.tracking.rollouts.sample import Rollout, RolloutRow
from asyncrl.tracking.rollouts.text import TokenText
from asyncrl.trajectory import Row, Trajectory, TurnRecord, TurnReward
from asyncrl.view.segments import segments

ROW_TOKENS = 65_536
"""Tokens shown of one row."""
ROWS = 64
"""Rows shown of one trajectory."""
TEXT_CHARS = 2_000_000
"""Characters shown of one trajectory; the rest is counted."""
PIECE_CHARS = 4_000
"""Characters shown of one token."""


def detail(trajectory: Trajectory | None, sample: Rollout | None, text: TokenText | None) -> dict[str, Any]:
    """What is known of one trajectory; at least one of the first two is given. `text` None: the run's tokenizer cannot
    be had, and tokens are shown by their numbers."""
    source: Any = trajectory if trajectory is not None else sample
    assert source is not None
    shown: dict[str, Any] = {
        "rewards": dict(source.rewards),
        "timings": dict(source.timings),
        "metrics": dict(source.metrics),
        "turns": [_turn(record) for record in source.turn_records],
        "turn_rewards": [_turn_rewards(turn) for turn in source.turn_rewards],
        "from": "payload" if trajectory is not None else "sample",
        "recorded": sample is not None,
        "digest": trajectory.digest() if trajectory is not None else source.digest,
        "rows": [],
    }
    left = TEXT_CHARS
    for number, row in enumerate(source.rows[:ROWS]):
        recorded = None if sample is None else sample.rows[number]
        made = _row(row, recorded, text, left)
        left -= sum(map(len, made["pieces"]))
        shown["rows"].append(made)
    shown["rows_cut"] = max(len(source.rows) - ROWS, 0)
    return shown


def _row(row: Row | RolloutRow, recorded: RolloutRow | None, text: TokenText | None, left: int) -> dict[str, Any]:
    length = len(row) if isinstance(row, Row) else len(row.token_ids)
    behind = 0 if isinstance(row, Row) else row.cut
    if isinstance(row, RolloutRow):
        pieces, ids, sampled = row.pieces(), row.token_ids, row.sampled
        versions, logprobs = row.versions, row.logprobs
    else:
        ids, sampled = row.token_ids[:ROW_TOKENS].tolist(), row.mask[:ROW_TOKENS].tolist()
        versions, logprobs = row.versions[:ROW_TOKENS].tolist(), row.logprobs[:ROW_TOKENS].tolist()
        pieces = _pieces(ids, recorded, text)
    count, pieces = _bounded(pieces[:ROW_TOKENS], max(left, 0))
    made: dict[str, Any] = {
        "pieces": pieces,
        "ids": ids[:count],
        "sampled": sampled[:count],
        "versions": versions[:count],
        "logprobs": logprobs[:count],
        "cut": length + behind - count,
        "segments": [asdict(part) | {"folded": part.folded} for part in segments(pieces, sampled[:count])],
    }
    if recorded is not None:
        made |= {
            "learner": recorded.learner_logprobs[:count],
            "weights": recorded.weights[:count],
            "advantages": recorded.advantages[:count],
            "loss": recorded.loss_mask[:count],
        }
    return made


def _pieces(ids: Sequence[int], recorded: RolloutRow | None, text: TokenText | None) -> list[str]:
    if text is None:
        return recorded.pieces() if recorded is not None and recorded.token_ids == ids else [f"<{id}>" for id in ids]
    words, ends = text.split(ids)
    return [words[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _bounded(pieces: Sequence[str], left: int) -> tuple[int, list[str]]:
    """How many tokens fit into `left` characters, and their texts."""
    shown = []
    for piece in pieces:
        short = piece if len(piece) <= PIECE_CHARS else f"{piece[:PIECE_CHARS]}[{len(piece) - PIECE_CHARS} more]"
        left -= len(short)
        if left < 0:
            break
        shown.append(short)
    return len(shown), shown


def _turn_rewards(turn: TurnReward) -> dict[str, Any]:
    return {
        "reward": turn.reward,
        "rewards": dict(turn.rewards),
        "spans": [[span.row, span.start, span.tokens] for span in turn.spans],
        "state": None if turn.state is None else named(turn.state),
    }


def named(state: bytes) -> str:
    """A state key as it is shown: its text, or hex digits for bytes that are none.

    >>> named(b"kitchen"), named(bytes([200, 1]))
    ('kitchen', 'c801')
    """
    try:
        text = state.decode()
    except UnicodeDecodeError:
        return state.hex()
    return text if text.isprintable() else state.hex()


def _turn(record: TurnRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in msgspec.structs.asdict(record)}
