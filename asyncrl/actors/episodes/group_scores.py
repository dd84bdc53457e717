"""`env.group_score`: the episodes of a group wait for each other, are compared, and then go to the buffer.

    buffer ──all tickets of a group──> one actor: episode 0 ──┐
                                                  episode 1 ──┼──> score ──> each trajectory with its score ──> put
                                                  episode 2 ──┘

A trajectory is put only with its full reward, so that what the buffer acknowledged is final. A waiting episode takes
up no slot. The buffer leases all tickets of a group to one actor. When that actor is lost, the whole group goes to
another one, with the recorded turns of its episodes (`buffer.turns`); those that were over wait there again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from dataclasses import dataclass, field

from asyncrl.actors.episodes.environment_calls import EpisodeFailed, check_reward, contained, failed
from asyncrl.actors.episodes.turn_rewards import with_more
from asyncrl.rewards.group_score import GroupAnswer, GroupScore, checked
from asyncrl.rewards.score import name_of
from asyncrl.trajectory import Ticket, Trajectory
from asyncrl.trajectory.turns import NOT_SCORED
from asyncrl.user_errors import Cause

log = logging.getLogger(__name__)

PART = "group"
"""Name of the group score among a trajectory's rewards."""


@dataclass(slots=True)
class _WaitingGroup:
    answers: dict[int, GroupAnswer] = field(default_factory=dict)
    """The episodes that are over, by index."""
    scored: asyncio.Future[dict[int, float]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class GroupScores:
    def __init__(self, score: GroupScore, weight: float, call_s: float, wait_s: float, max_reward: float = 1e6) -> None:
        """`weight`: of the score in the reward. `call_s`: deadline of the score. `wait_s`: longest wait for a group.
        `max_reward`: largest size of the score, and of the whole reward."""
        self._max_reward = max_reward
        self._score, self._weight, self._call_s, self._wait_s = score, weight, call_s, wait_s
        self._groups: dict[tuple[int, int], _WaitingGroup] = {}
        self._scoring: set[asyncio.Task[None]] = set()

    async def compared(self, ticket: Ticket, trajectory: Trajectory, answer: GroupAnswer) -> Trajectory:
        """The trajectory with its group score added. Raises EpisodeFailed (NOT_SCORED, never a reward) when the group
        is not complete in time, or the score fails."""
        key = ticket.id.branch, ticket.id.group
        group = self._groups.setdefault(key, _WaitingGroup())
        group.answers[ticket.id.index] = answer
        if len(group.answers) == ticket.group_size:
            del self._groups[key]
            task = asyncio.create_task(self._run(ticket, group))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
        try:
            async with asyncio.timeout(self._wait_s):
                scores = await asyncio.shield(group.scored)
        except TimeoutError as error:
            late = f"{ticket.id}: its group was not complete within {self._wait_s:g} s (actors.episode_s)"
            raise EpisodeFailed(NOT_SCORED, late) from error
        finally:
            self._leave(key, group, ticket.id.index)
        value = scores[ticket.id.index]
        reward, rewards = trajectory.reward + self._weight * value, {**trajectory.rewards, PART: value}
        try:
            for number in (value, reward):
                check_reward(number, f"group score {name_of(self._score)}", self._max_reward)
        except EpisodeFailed as failure:
            raise _not_scored(failure) from failure
        turn_rewards = with_more(trajectory.turn_rewards, self._weight * value, {PART: value})
        return dataclasses.replace(trajectory, reward=reward, rewards=rewards, turn_rewards=turn_rewards)

    def _leave(self, key: tuple[int, int], group: _WaitingGroup, index: int) -> None:
        """Remove an episode that was given up; its ticket is issued again, as another attempt."""
        if self._groups.get(key) is group:
            group.answers.pop(index, None)
            if not group.answers:
                del self._groups[key]

    async def _run(self, ticket: Ticket, group: _WaitingGroup) -> None:
        indices = sorted(group.answers)
        deadline = asyncio.timeout(self._call_s)
        name = name_of(self._score)
        try:
            async with deadline:
                scores = await contained(lambda: self._score(ticket.task, [group.answers[i] for i in indices]))
            values = checked(scores, len(indices), name)
            group.scored.set_result(dict(zip(indices, values, strict=True)))
        except (Exception, asyncio.CancelledError) as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            what = f"group score {name}"
            slow = f"{what}: did not return within {self._call_s:g} s (env.call_s)"
            failure = EpisodeFailed("", slow, Cause(what, outage=True)) if late else failed(what, error)
            group.scored.set_exception(_not_scored(failure))
            group.scored.exception()  # mark as retrieved, even if no episode waits any more


def _not_scored(failure: EpisodeFailed) -> EpisodeFailed:
    """The same failure, after which the episodes go on at their last turn."""
    return EpisodeFailed(NOT_SCORED, failure.detail, failure.cause)
