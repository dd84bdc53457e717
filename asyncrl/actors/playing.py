"""Who plays a ticket: the config's environment, turn by turn, or its agent, through the endpoint."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from asyncrl.actors.engines.protocol import Engine
from asyncrl.actors.envs import ENVIRONMENTS
from asyncrl.actors.envs.agent import is_agent, provided_by_actor
from asyncrl.actors.envs.protocol import Env
from asyncrl.actors.episode import Limits, Progress, play
from asyncrl.actors.renderer import Renderer
from asyncrl.config import Config
from asyncrl.data.base import Task
from asyncrl.errors import ConfigError
from asyncrl.plugins import check_options, resolve
from asyncrl.trajectory import Ticket, Trajectory

Play = Callable[[Ticket, Progress], Awaitable[Trajectory]]
"""One episode. Raises EpisodeFailed, and what the engine raises (EngineDied)."""


@asynccontextmanager
async def player(config: Config, engine: Engine, renderer: Renderer, *, actor: str) -> AsyncIterator[Play]:
    """What plays episodes of `env.name` while the context is open. Raises ConfigError."""
    name, limits = config.env.name, Limits.of(config)
    make = _chosen(config)
    if not is_agent(make):
        make_env = functools.partial(make, **config.env.options)
        # An environment that stands for several says under which name a task counts.
        name_of: Callable[[Task], str] = getattr(make, "name_of", lambda task: name)

        async def play_env(ticket: Ticket, progress: Progress) -> Trajectory:
            return await play(
                ticket, make_env, engine, renderer, limits, progress, actor=actor, env_name=name_of(ticket.task)
            )

        yield play_env
        return

    # uvicorn, and openai, which take a second to import, are for agents only.
    from asyncrl.actors.endpoint import Endpoint
    from asyncrl.actors.endpoint_agent import AgentPlayer, Clients

    agent = functools.partial(make, **config.env.options)
    async with Endpoint(config.model.path, limits.max_tokens) as endpoint, Clients(config.actors.episode_s) as clients:
        yield AgentPlayer(agent, endpoint, clients, engine, renderer, limits, actor=actor, env_name=name)


def environment(config: Config) -> Callable[[], Env]:
    """What makes one environment per episode. Raises ConfigError, also for an agent: that is no environment."""
    make = _chosen(config)
    if is_agent(make):
        raise ConfigError(f"env.name is {config.env.name!r}, an agent: expected an environment here.")
    return functools.partial(make, **config.env.options)


def _chosen(config: Config) -> Callable[..., Env]:
    try:
        make = resolve(config.env.name, ENVIRONMENTS, "env.name")
        check_options(make, config.env.options, "env.options", provided_by_actor(make))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return make
