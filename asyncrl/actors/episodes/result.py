"""The outcome of an episode, and the trajectory made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.actors.episodes.progress import Progress
from asyncrl.data.base import Message
from asyncrl.trajectory import Row, StopReason, Ticket, Trajectory, TurnRecord, TurnReward


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    rows: tuple[Row, ...]
    reward: float
    rewards: Mapping[str, float]
    metrics: Mapping[str, float]
    turns: int
    stop_reason: StopReason
    messages: Sequence[Message] = ()
    """The whole conversation up to the policy's last message; empty for an agent, which keeps its own."""
    turn_records: Sequence[TurnRecord] = ()
    turn_rewards: tuple[TurnReward, ...] = ()
    feedback: str = ""
    """The text of the environment's last messages."""

    def trajectory(self, ticket: Ticket, progress: Progress, *, actor: str, env_name: str) -> Trajectory:
        """The trajectory of this episode, which enters its last phase: `put`."""
        progress.enter("put")
        return Trajectory(
            id=ticket.id,
            attempt=ticket.attempt,
            kind=ticket.kind,
            actor=actor,
            task_id=str(ticket.task["id"]),
            env=env_name,
            rows=self.rows,
            reward=self.reward,
            rewards=self.rewards,
            turns=self.turns,
            stop_reason=self.stop_reason,
            timings={**progress.seconds, "total": progress.at - progress.started},
            metrics=self.metrics,
            turn_records=tuple(self.turn_records),
            turn_rewards=self.turn_rewards,
        )
