"""A trajectory's turns as arrays on its tokens: `turn_of`, `turn_rewards` and `states` of a Batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.trajectory import Trajectory, TurnReward

NO_TURN = -1
"""Turn of a token that no turn sampled."""
NO_STATE = -1
"""State of a turn whose state has no name."""

Fields = dict[str, npt.NDArray[Any]]


class StateNumbers:
    """A number for each state of each group: 0, 1, 2 ... in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str, bytes], int] = {}

    def of(self, t: Trajectory, number: int, turn: TurnReward) -> int:
        """Number of the state in which the turn `number` of `t` was sampled. A first turn whose state has no name is in
        the state of its prompt, and in no other."""
        if turn.state is not None:
            key = (t.id.group, "named", turn.state)
        elif number == 0 and turn.spans:
            first = turn.spans[0]
            key = (t.id.group, "prompt", t.rows[first.row].token_ids[: first.start].tobytes())
        else:
            return NO_STATE
        return self._numbers.setdefault(key, len(self._numbers))


def turn_fields(t: Trajectory, states: StateNumbers) -> list[Fields]:
    """The fields of each row of `t`, in order. A turn without a token is no step of an estimator: what it earned counts
    for the turn before it, or, where none has tokens, for the first that has."""
    fields = [_blank(len(row)) for row in t.rows]
    earlier = 0.0
    last: tuple[int, int] | None = None
    for number, turn in enumerate(t.turn_rewards):
        state = states.of(t, number, turn)
        for span in turn.spans:
            of_row, tokens = fields[span.row], slice(span.start, span.start + span.tokens)
            of_row["turn_of"][tokens], of_row["states"][tokens] = number, state
            last = span.row, span.start + span.tokens - 1
        if last is None:
            earlier += turn.reward
            continue
        fields[last[0]]["turn_rewards"][last[1]] += turn.reward + earlier
        earlier = 0.0
    return fields


def _blank(tokens: int) -> Fields:
    return {
        "turn_of": np.full(tokens, NO_TURN, np.int32),
        "turn_rewards": np.zeros(tokens, np.float32),
        "states": np.full(tokens, NO_STATE, np.int32),
    }
