"""Plays tickets: in the config's environment, turn by turn, or with its agent, through the endpoint."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from asyncrl.actors.engines.protocol import Engine
from asyncrl.actors.envs import ENVIRONMENTS
from asyncrl.actors.envs.agent import is_agent, is_replayable, provided_by_actor
from asyncrl.actors.envs.hosting.pool import EnvWorkers
from asyncrl.actors.envs.protocol import Env
from asyncrl.actors.episodes.chat import ChatResult, ServedModel, chat
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.group_scores import GroupScores
from asyncrl.actors.episodes.hints import Hints
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.config import Config
from asyncrl.config.held_out import for_set
from asyncrl.data.base import Task
from asyncrl.data.checked import UNREADABLE
from asyncrl.errors import ConfigError
from asyncrl.plugins import check_options, resolve
from asyncrl.redaction import resolved
from asyncrl.rendering.template import Renderer
from asyncrl.rewards.group_score import GroupAnswer, GroupScore, open_group_score
from asyncrl.trajectory import Ticket, Trajectory

log = logging.getLogger(__name__)
R = TypeVar("R")
Play = Callable[[Ticket, Progress], Awaitable[Trajectory]]
"""Plays one episode. Raises EpisodeFailed, and what the engine raises (EngineDied)."""


@asynccontextmanager
async def player(config: Config, engine: Engine, renderer: Renderer, *, actor: str) -> AsyncIterator[Play]:
    """A function that plays episodes of `env.name` while the context is open. Raises ConfigError."""
    name, limits = config.env.name, EpisodeLimits.of(config)
    make = _chosen(config)
    if not is_agent(make):
        own = {f"env.options.envs.{of}": each for of, each in _own_limits(config, make).items()}
        for where, each in (own or {"env": limits}).items():
            each.compaction.check(renderer, each.max_tokens, each.max_new_tokens, where)
        name_of, limits_of = _by_env(config, make)
        score = open_group_score(config)
        scores = None if score is None else _group_scores(config, score)
        hints = Hints.named(config)
        async with _hosted(config, make) as make_env:

            async def play_env(ticket: Ticket, progress: Progress) -> Trajectory:
                progress.env = name_of(ticket.task)
                result = await play(ticket, make_env, engine, renderer, limits_of(ticket.task), progress)
                trajectory = result.trajectory(ticket, progress, actor=actor, env_name=progress.env)
                if hints is not None:
                    trajectory = dataclasses.replace(trajectory, hint=hints.of(ticket, result.feedback))
                if scores is None or ticket.kind == "eval":
                    return trajectory
                answer = GroupAnswer(result.messages, result.reward, result.rewards)
                return await scores.compared(ticket, trajectory, answer)

            yield _of_readable(play_env)
        return
    _refuse_of_agents(config)
    _check_replayable(config, make)
    # uvicorn, and openai, which take a second to import, are for agents only.
    from asyncrl.actors.endpoint.agent import AgentPlayer
    from asyncrl.actors.endpoint.clients import Clients
    from asyncrl.actors.endpoint.server import EndpointServer

    agent = functools.partial(make, **_options(config))
    async with (
        EndpointServer(config.model.path, limits.max_tokens, config.actors.constraints) as endpoint,
        Clients(config.actors.most_episode_s) as clients,
    ):
        play_agent = AgentPlayer(agent, endpoint, clients, engine, renderer, limits, actor=actor, env_name=name)
        hints = Hints.named(config)
        yield _of_readable(play_agent if hints is None else _hinted(play_agent, hints))


def _refuse_of_agents(config: Config) -> None:
    """Raises ConfigError for fields that only environments can have."""
    name = config.env.name
    if config.env.group_score:
        raise ConfigError(
            f"env.group_score is {config.env.group_score!r} and env.name {name!r}, an agent: group scores "
            "compare episodes of environments only. Remove env.group_score."
        )
    if config.env.compact:
        raise ConfigError(
            f"env.compact is {config.env.compact:g} and env.name {name!r}, an agent: it keeps its own conversation, "
            "and is the one that can sum it up. Remove env.compact."
        )
    if config.learner.teacher.hints and config.learner.teacher.shown == "feedback":
        raise ConfigError(
            f"learner.teacher.shown is feedback and env.name {name!r}, an agent, whose feedback nobody sees: set "
            "learner.teacher.shown answer."
        )
    if config.env.workers != "async":
        raise ConfigError(
            f"env.workers is {config.env.workers} and env.name {name!r}, an agent: a plain function is played in a "
            "thread anyway, a coroutine function on the event loop. Set env.workers async."
        )


def _hinted(play_agent: Play, hints: Hints) -> Play:
    async def hinted(ticket: Ticket, progress: Progress) -> Trajectory:
        return dataclasses.replace(await play_agent(ticket, progress), hint=hints.of(ticket, ""))

    return hinted


@asynccontextmanager
async def players(config: Config, engine: Engine, renderer: Renderer, *, actor: str) -> AsyncIterator[Play]:
    """Like `player`, for the tickets of a run: those of a held-out set with an environment of its own are played there.
    Raises ConfigError."""
    async with AsyncExitStack() as opened:
        train = await opened.enter_async_context(player(config, engine, renderer, actor=actor))
        own = {
            name: await opened.enter_async_context(player(for_held_out(config, name), engine, renderer, actor=actor))
            for name, given in config.eval.sets.items()
            if given.env
        }

        async def play_any(ticket: Ticket, progress: Progress) -> Trajectory:
            return await own.get(ticket.eval_set, train)(ticket, progress)

        yield play_any


def for_held_out(config: Config, name: str) -> Config:
    """The config with which the held-out set of this name is played. Where an environment of its own is an agent, which
    keeps its own conversation, `env.compact`, `env.workers` and `buffer.turns` are those of training only. Raises
    ConfigError."""
    alone = for_set(config, name)
    if name not in config.eval.sets or not config.eval.sets[name].env or not is_agent(_chosen(alone)):
        return alone
    env = alone.env.model_copy(update={"compact": 0.0, "workers": "async"})
    buffer = alone.buffer.model_copy(update={"turns": "off"})
    return alone.model_copy(update={"env": env, "buffer": buffer})


def _of_readable(play: Callable[[Ticket, Progress], Awaitable[R]]) -> Callable[[Ticket, Progress], Awaitable[R]]:
    """Like `play`, but raises EpisodeFailed for a task that its source could not give."""

    async def play_readable(ticket: Ticket, progress: Progress) -> R:
        if problem := ticket.task.get(UNREADABLE):
            raise EpisodeFailed("env_error", str(problem))
        return await play(ticket, progress)

    return play_readable


def _check_replayable(config: Config, agent: Callable[..., Any]) -> None:
    """Says whether `buffer.turns` does nothing for the agent. Raises ConfigError."""
    try:
        replayable = is_replayable(agent)
    except ValueError as error:
        raise ConfigError(f"env.name {config.env.name!r}: {error}") from error
    if config.buffer.turns != "off" and not replayable:
        log.warning(
            "buffer.turns is %s and the agent %s does not declare `replayable`: its turns are not recorded, and an "
            "interrupted episode begins again (docs/how-to/long-episodes.md)",
            config.buffer.turns, config.env.name,
        )  # fmt: skip


def _group_scores(config: Config, score: GroupScore) -> GroupScores:
    env = config.env
    return GroupScores(score, env.group_score_weight, env.call_s, config.actors.most_episode_s, env.max_reward)


def _by_env(config: Config, make: Callable[..., Env]) -> tuple[Callable[[Task], str], Callable[[Task], EpisodeLimits]]:
    """Two functions of a task: the name under which it is counted, and its limits. Only a mix has several of each."""
    name_of: Callable[[Task], str] = getattr(make, "name_of", lambda task: config.env.name)
    limits, own = EpisodeLimits.of(config), _own_limits(config, make)
    return name_of, lambda task: own.get(name_of(task), limits)


def _own_limits(config: Config, make: Callable[..., Env]) -> dict[str, EpisodeLimits]:
    """The limits of each environment of a mix, by its name."""
    own: dict[str, dict[str, Any]] = getattr(make, "limits", lambda options: {})(config.env.options)
    limits = EpisodeLimits.of(config)
    return {name: dataclasses.replace(limits, **changed) for name, changed in own.items()}


@asynccontextmanager
async def _hosted(config: Config, make: Callable[..., Env]) -> AsyncIterator[Callable[[], Env]]:
    """A function that makes an environment per episode, in the place that `env.workers` names."""
    env = config.env
    if env.workers == "async":
        yield functools.partial(make, **_options(config))
        return
    async with EnvWorkers(env.workers, env.worker_count, env.name, _options(config), env.call_s) as workers:
        yield workers.env


@asynccontextmanager
async def chatter(
    config: Config, served: ServedModel
) -> AsyncIterator[Callable[[Ticket, Progress], Awaitable[ChatResult]]]:
    """A function that plays episodes of `env.name` with a served model while the context is open. Raises ConfigError,
    also for an agent, which brings its own client."""
    make = _chosen(config)
    if is_agent(make):
        raise ConfigError(f"env.name is {config.env.name!r}, an agent: call it with a client of the endpoint yourself.")
    if config.env.compact:
        raise ConfigError(
            f"env.compact is {config.env.compact:g}, and a served model cannot be asked for summaries: where they "
            "begin is counted in tokens of the row, which are not seen. Set env.compact 0, or play with a checkpoint."
        )
    _, limits_of = _by_env(config, make)
    async with _hosted(config, make) as make_env:

        async def play_chat(ticket: Ticket, progress: Progress) -> ChatResult:
            return await chat(ticket, make_env, served, limits_of(ticket.task))

        yield _of_readable(play_chat)


def environment(config: Config) -> Callable[[], Env]:
    """A function that makes one environment per episode. Raises ConfigError, also for an agent."""
    make = _chosen(config)
    if is_agent(make):
        raise ConfigError(f"env.name is {config.env.name!r}, an agent: expected an environment here.")
    return functools.partial(make, **_options(config))


def _options(config: Config) -> dict[str, Any]:
    """`env.options`, with the environment variables that they name. Raises ConfigError for one that is not set."""
    try:
        options: dict[str, Any] = resolved(config.env.options)
    except ValueError as error:
        raise ConfigError(f"env.options: {error}") from error
    return options


def _chosen(config: Config) -> Callable[..., Env]:
    try:
        make: Callable[..., Env] = resolve(config.env.name, ENVIRONMENTS, "env.name")
        check_options(make, config.env.options, "env.options", provided_by_actor(make))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return make
