"""Demonstrations as the flat tensors of a Batch, rendered as the actors render.

Every rank renders all of a batch's demonstrations, as every rank is given all of its trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.buffer.client.messages import Demonstration
from asyncrl.config import Config
from asyncrl.data.demonstrations import chat
from asyncrl.errors import RunError
from asyncrl.learner.batch import Batch
from asyncrl.learner.batch.turn_fields import NO_STATE, NO_TURN
from asyncrl.model import positions
from asyncrl.rendering.build import build_renderer
from asyncrl.rendering.demonstrations import CannotRender, ShownRow, rows_of
from asyncrl.rendering.template import Renderer
from asyncrl.trajectory import CONTEXT

ENV = "demonstrations"
"""What their rows are counted under."""


class Rendered:
    """Renders the demonstrations of a batch."""

    def __init__(self, renderer: Renderer, max_tokens: int | None) -> None:
        """`max_tokens`: of one row; None: no bound is known."""
        self._renderer, self._max_tokens = renderer, max_tokens

    @classmethod
    def of(cls, config: Config) -> Rendered | None:
        """None for a run without demonstrations. Raises ConfigError."""
        return cls(build_renderer(config), positions(config.model)) if config.data.demonstrations else None

    def batch(self, demonstrations: Sequence[Demonstration]) -> Batch:
        """Rows that carry loss at the assistant's tokens; a demonstration is an episode and a group of its own, in the
        order given. Raises RunError naming the file, the line and the remedy."""
        rows = [(place, row) for place, each in enumerate(demonstrations) for row in self._rows(each)]
        return flat(rows)

    def _rows(self, each: Demonstration) -> list[ShownRow]:
        if chat.digest(each.chat).hex() != each.digest:
            raise RunError(f"data.demonstrations: {each.where} arrived with another digest than the ledger's")
        try:
            return rows_of(self._renderer, chat.decoded(each.chat), self._max_tokens)
        except CannotRender as error:
            raise RunError(f"data.demonstrations: {each.where} cannot be trained on: {error}.") from error


def flat(rows: Sequence[tuple[int, ShownRow]]) -> Batch:
    """One Batch of rows, each with its demonstration's place."""
    ids = torch.tensor([token for _, row in rows for token in row.ids], dtype=torch.int64)
    mask = torch.tensor([shown for _, row in rows for shown in row.mask], dtype=torch.bool)
    places = torch.tensor([place for place, _ in rows], dtype=torch.int64)
    zeros, count = torch.zeros(len(ids)), len(rows)
    return Batch(
        token_ids=ids,
        mask=mask,
        behaviour=zeros,
        versions=torch.full_like(ids, CONTEXT),
        rewards=zeros,
        turn_of=torch.full_like(ids, NO_TURN, dtype=torch.int32),
        turn_rewards=zeros,
        states=torch.full_like(ids, NO_STATE, dtype=torch.int32),
        reward_components=zeros[None],
        reward_names=("",),
        lengths=torch.tensor([len(row.ids) for _, row in rows], dtype=torch.int64),
        groups=places,
        episodes=places,
        row_weights=torch.ones(count),
        loss_weights=torch.ones(count),
        replayed=torch.zeros(count, dtype=torch.bool),
        turns=torch.ones(count, dtype=torch.int64),
        truncated=torch.zeros(count, dtype=torch.bool),
        greedy=torch.zeros(count, dtype=torch.bool),
        envs=torch.zeros(count, dtype=torch.int64),
        env_names=(ENV,),
    )
