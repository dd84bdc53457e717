"""`env.group_score`: the episodes of a group wait for each other here, are compared, and go to the buffer then.

    buffer ──all tickets of a group──> one actor: episode 0 ──┐
                                                  episode 1 ──┼──> score ──> each trajectory with its part ──> put
                                                  episode 2 ──┘

Nothing is put before it has its whole reward, so that what the buffer acknowledged is final. An episode that waits
takes up no slot. The buffer lends the tickets of a group to one actor only, and begins the group anew when that one is
lost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from dataclasses import dataclass, field

from asyncrl.actors.episodes.environment_calls import EpisodeFailed, contained
from asyncrl.rewards.group_score import GroupAnswer, GroupScore, checked
from asyncrl.rewards.score import name_of
from asyncrl.trajectory import Ticket, Trajectory

log = logging.getLogger(__name__)

PART = "group"
"""Name of the score among a trajectory's rewards."""


@dataclass(slots=True)
class _Group:
    answers: dict[int, GroupAnswer] = field(default_factory=dict)
    """By index; those of episodes that are over and wait."""
    scored: asyncio.Future[dict[int, float]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Groups:
    def __init__(self, score: GroupScore, weight: float, call_s: float, wait_s: float) -> None:
        """`weight`: of the score in the reward. `call_s`: of the score, `wait_s`: for the others of a group."""
        self._score, self._weight, self._call_s, self._wait_s = score, weight, call_s, wait_s
        self._groups: dict[tuple[int, int], _Group] = {}
        self._scoring: set[asyncio.Task[None]] = set()

    async def compared(self, ticket: Ticket, trajectory: Trajectory, answer: GroupAnswer) -> Trajectory:
        """The trajectory with its part of the group's score. Raises EpisodeFailed when the group does not become whole
        in time, or the score fails: `env_error`, never a reward."""
        key = ticket.id.branch, ticket.id.group
        group = self._groups.setdefault(key, _Group())
        group.answers[ticket.id.index] = answer
        if len(group.answers) == ticket.group_size:
            del self._groups[key]
            task = asyncio.create_task(self._run(ticket, group))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
        try:
            async with asyncio.timeout(self._wait_s):
                found = await asyncio.shield(group.scored)
        except TimeoutError as error:
            late = f"{ticket.id}: its group was not whole within {self._wait_s:g} s (actors.episode_s)"
            raise EpisodeFailed("env_error", late) from error
        finally:
            self._leave(key, group, ticket.id.index)
        value = found[ticket.id.index]
        rewards = {**trajectory.rewards, PART: value}
        return dataclasses.replace(trajectory, reward=trajectory.reward + self._weight * value, rewards=rewards)

    def _leave(self, key: tuple[int, int], group: _Group, index: int) -> None:
        """Of an episode that was given up: its ticket is lent again, and comes back as another attempt."""
        if self._groups.get(key) is group:
            group.answers.pop(index, None)
            if not group.answers:
                del self._groups[key]

    async def _run(self, ticket: Ticket, group: _Group) -> None:
        places = sorted(group.answers)
        deadline = asyncio.timeout(self._call_s)
        name = name_of(self._score)
        try:
            async with deadline:
                found = await contained(lambda: self._score(ticket.task, [group.answers[i] for i in places]))
            values = checked(found, len(places), name)
            group.scored.set_result(dict(zip(places, values, strict=True)))
        except (Exception, asyncio.CancelledError) as error:
            late = isinstance(error, TimeoutError) and deadline.expired()
            what = (
                f"did not return within {self._call_s:g} s (env.call_s)" if late else f"{type(error).__name__}: {error}"
            )
            failed = EpisodeFailed("env_error", f"group score {name}: {what}")
            group.scored.set_exception(failed)
            group.scored.exception()  # seen, also when nobody waits any more
