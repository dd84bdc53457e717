"""An episode played by an agent: the agent sends requests, which the endpoint records, and returns the reward."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from asyncrl.actors.endpoint.clients import Clients
from asyncrl.actors.endpoint.server import EndpointServer
from asyncrl.actors.endpoint.session import Session
from asyncrl.actors.engines.protocol import Engine
from asyncrl.actors.envs.agent import is_async, is_replayable, rewards_of
from asyncrl.actors.episodes.environment_calls import EpisodeFailed, check_reward, contained, failed, failing
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.actors.episodes.result import EpisodeResult
from asyncrl.actors.episodes.turn_rewards import of_last_turn
from asyncrl.data.base import Task
from asyncrl.rendering.template import Renderer
from asyncrl.trajectory import Ticket, Trajectory


class AgentPlayer:
    """Plays tickets with an agent."""

    def __init__(
        self,
        agent: Callable[[Task, Any], Any],
        endpoint: EndpointServer,
        clients: Clients,
        engine: Engine,
        renderer: Renderer,
        limits: EpisodeLimits,
        *,
        actor: str,
        env_name: str,
    ) -> None:
        self._agent, self._endpoint, self._clients = agent, endpoint, clients
        self._engine, self._renderer, self._limits = engine, renderer, limits
        self._actor, self._env_name, self._replayable = actor, env_name, is_replayable(agent)

    async def __call__(self, ticket: Ticket, progress: Progress) -> Trajectory:
        """Raises EpisodeFailed, and what the engine raises.

        An agent that raises after it exceeded a limit of the episode missed its goal: reward 0. Any other exception is
        a failure of the agent, never a reward.
        """
        progress.env = self._env_name
        was_read, replayable = self._clients.receipts.was_read, self._replayable
        parts = (self._engine, self._renderer, self._limits, progress)
        session = Session(ticket, *parts, was_read, replayable=replayable)
        task = {**ticket.task, "episode": ticket.id.index}
        asynchronous = is_async(self._agent)
        with self._endpoint.open(session) as base_url:
            client = self._clients.of(base_url, asynchronous=asynchronous)
            call = functools.partial(self._agent, task, client)
            started = call if asynchronous else functools.partial(asyncio.to_thread, call)
            playing = asyncio.ensure_future(contained(started))
            try:
                await asyncio.wait([playing, session.broken], return_when=asyncio.FIRST_COMPLETED)
                if session.broken.done():
                    session.broken.result()
                reward, rewards = self._rewards(playing, session)
                if session.limit is None:
                    session.recorded.check_all_given()
                for _ in range(2):  # so that the event loop handles the last events of connections
                    await asyncio.sleep(0)
                rows, choices, records, places = session.received()
            finally:
                playing.cancel()
                self._clients.receipts.forget(session.transmissions())
                await session.requests.close()
                if not session.broken.cancel():
                    session.broken.exception()  # mark as retrieved
        if not len(rows):
            raise EpisodeFailed(
                "env_error", f"agent {self._env_name} got no reply of the policy: it must send a request"
            )
        stop_reason = session.stop_reason(choices)
        earned = of_last_turn(places, reward, rewards)
        result = EpisodeResult(
            rows.freeze(), reward, rewards, metrics={}, turns=len(records), stop_reason=stop_reason,
            turn_records=records, turn_rewards=earned,
        )  # fmt: skip
        return result.trajectory(ticket, progress, actor=self._actor, env_name=self._env_name)

    def _rewards(self, playing: asyncio.Future[Any], session: Session) -> tuple[float, dict[str, float]]:
        name = f"agent {self._env_name}"
        if playing.cancelled():
            raise EpisodeFailed("env_error", f"{name} cancelled itself")
        error = playing.exception()
        if error is not None and session.limit is None:
            raise failed(name, error) from error
        with failing(name):
            reward, parts = rewards_of(playing.result() if error is None else 0.0)
            for value in (reward, *parts.values()):
                check_reward(value, name, self._limits.max_reward)
            return reward, parts
