"""One sampled trajectory of a batch: its text, and what sampling and training knew about each token.

A line of JSON holds one; `Run.rollouts` reads them (docs/how-to/view.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from asyncrl.errors import RunError
from asyncrl.trajectory import Count, TurnRecord, TurnReward

FORMAT = 1
"""Raised when a field changes its meaning; a later field is added with a default, which needs no new number."""

_Length = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class RolloutRow(msgspec.Struct, frozen=True):
    """One token sequence. Every list has one entry per token, T, in the order of the row."""

    text: str
    """What the tokens say, special tokens included."""
    ends: list[_Length]
    """[T] characters of `text` up to and with each token; one whose bytes end within a character adds none."""
    token_ids: list[int]
    sampled: list[bool]
    """[T] true where the policy sampled the token."""
    versions: list[int]
    """[T] policy version that sampled the token; -1 where none did."""
    logprobs: list[float]
    """[T] behaviour logprob, natural log; 0 where the policy did not sample."""
    learner_logprobs: list[float | None]
    """[T] the same under the learner's weights at the start of the step (the proximal logprob); None: not finite."""
    weights: list[float | None]
    """[T] importance weight in the loss, after all corrections."""
    advantages: list[float | None]
    loss_mask: list[bool]
    """[T] whether the token carried loss: not context, not over age, not rejected by a correction."""
    cut: Count = 0
    """Tokens of the row behind these, left out for their number."""

    def pieces(self) -> list[str]:
        """[T] the text of each token."""
        return [self.text[start:end] for start, end in zip([0, *self.ends], self.ends, strict=False)]


class Rollout(msgspec.Struct, frozen=True):
    """One trajectory, in one batch that was trained on."""

    format: int
    branch: int
    """Branch of the learner when it trained on the batch."""
    batch: int
    """Its number; with `branch` it names the file."""
    version: int
    """The policy's before the training step."""
    outcome: str
    """applied, or guard: the step was refused, and the version stayed."""
    group: int
    index: int
    attempt: int
    actor: str
    task_id: str
    env: str
    reward: float
    """The reward that the environment gave; `learner.shaping` may have trained on another."""
    rewards: dict[str, float]
    """Its parts by name."""
    turns: int
    stop_reason: str
    group_weight: float
    """0: a filter rejected the group, but it was kept to avoid starving the learner."""
    digest: str
    """The trajectory's, as the ledger has it."""
    rows: list[RolloutRow]
    timings: dict[str, float] = {}
    metrics: dict[str, float] = {}
    turn_records: list[TurnRecord] = []
    turn_rewards: list[TurnReward] = []
    """What each turn earned, and where its tokens are."""

    @property
    def step(self) -> int:
        """The training step, 1, 2 ...: the version that it made, or, refused, would have made."""
        return self.version + 1

    @property
    def text(self) -> str:
        """The text of all rows."""
        return "\n".join(row.text for row in self.rows)


_encode = msgspec.json.Encoder().encode
_LINE = msgspec.json.Decoder(Rollout)
_FORMAT = msgspec.json.Decoder(msgspec.defstruct("Format", [("format", int)]))


def encode(rollout: Rollout) -> bytes:
    """One line. A number that is not finite becomes null."""
    return _encode(rollout) + b"\n"


def decode(lines: Iterable[bytes], where: str) -> list[Rollout]:
    """The samples of a file. Raises RunError, which names it as `where`, for what is damaged or of a newer asyncrl."""
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_LINE.decode(line))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RunError(f"{where}, line {number}: {_refusal(line, error)}") from error
    return found


def _refusal(line: bytes, error: Exception) -> str:
    try:
        format = _FORMAT.decode(line).format  # type: ignore[attr-defined]
    except msgspec.MsgspecError:
        format = FORMAT
    if format != FORMAT:
        return f"it has format {format}, this asyncrl reads {FORMAT}: read it with the asyncrl that wrote it."
    return f"it is no sample of a rollout ({error}): the file is damaged; remove it to read the others."
