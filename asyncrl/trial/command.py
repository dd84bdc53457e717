"""Plays the first training tasks of a configuration as a run would, and prints what came of it.

    config ──tasks──> player (the actor's) or chatter (a served model) ──> Tried ──> text.py, findings.py

The tasks are those that the run would draw first, and the seeds those of its first attempts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from asyncrl.actors.episodes.chat import ChatResult
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Progress
from asyncrl.buffer.tasks.drawing import checked_task
from asyncrl.buffer.tasks.sources import open_curriculum, open_source, ticket_seed
from asyncrl.config import Config
from asyncrl.data.base import Task, TaskSource
from asyncrl.data.checked import readable
from asyncrl.evaluation import Endpoint, Plays, by_checkpoint, by_endpoint
from asyncrl.process.daemon_threads import use_daemon_threads
from asyncrl.rendering.build import build_renderer
from asyncrl.rendering.template import Renderer, TemplateRenderer
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from asyncrl.trial.findings import LOST, Group, Limits, findings
from asyncrl.trial.text import conversation, episode_line, summary
from asyncrl.trial.tried import Tried, of_chat, of_trajectory


@dataclass(frozen=True, slots=True)
class Trial:
    """What is played, and how much of it is printed."""

    tasks: int
    episodes: int
    """Episodes of each task."""
    show_all: bool
    """Print every conversation, not only the first of each task."""


def run(config: Config, trial: Trial, endpoint: Endpoint | None, say: Callable[[str], None] = print) -> int:
    """Plays and prints; gives the exit code: 1 when every episode failed. Raises ConfigError."""
    tasks = first_tasks(config, trial.tasks)
    # With an endpoint the template is not used, and the model need not be here.
    renderer = None if endpoint else build_renderer(config)
    groups, seconds = asyncio.run(_played(config, tasks, trial, endpoint, renderer))
    for task, group in zip(tasks, groups, strict=True):
        say(f"task {task['id']}")
        _say_group(group, trial, say)
    played = [each for group in groups for each in group if isinstance(each, Tried)]
    failed = sum(map(len, groups)) - len(played)
    for line in summary(played, failed, len(tasks), seconds):
        say(line)
    unstable = renderer.prefix_breaks() if isinstance(renderer, TemplateRenderer) else ()
    wrong = findings(groups, _limits(config), unstable)
    say("in training this would go wrong:" if wrong else "nothing was found that would go wrong in training")
    for sentence in wrong:
        say(f"  - {sentence}")
    return 0 if played else 1


def first_tasks(config: Config, count: int) -> list[Task]:
    """The training tasks that a run would draw first. Raises ConfigError, and RunError for one that no ticket can
    carry."""
    source = open_source(config)
    curriculum = open_curriculum(config, source)
    drawn = [curriculum.draw(number) for number in range(count)]
    return [_task(source, index) for index in drawn]


def _task(source: TaskSource, index: int) -> Task:
    """The source's task `index`. One that cannot be read fails when played, as in a run."""
    place = f"task {index}"
    return checked_task(readable(lambda: source.task(index), place), place)


async def _played(
    config: Config, tasks: Sequence[Task], trial: Trial, endpoint: Endpoint | None, renderer: Renderer | None
) -> tuple[list[Group], float]:
    """The groups, and the seconds that they took together, once the model was loaded."""
    use_daemon_threads()
    slots = asyncio.Semaphore(config.actors.most_slots)
    async with by_checkpoint(config) if endpoint is None else by_endpoint(config, endpoint) as play:

        async def one(number: int, index: int) -> Tried | str:
            async with slots:
                return await _episode(config, play, _ticket(config, number, tasks[number], index, trial), renderer)

        async def group(number: int) -> Group:
            return await _group([one(number, index) for index in range(trial.episodes)], bool(config.env.group_score))

        began = time.monotonic()
        groups = list(await asyncio.gather(*(group(number) for number in range(len(tasks)))))
        return groups, time.monotonic() - began


async def _group(episodes: Sequence[Coroutine[None, None, Tried | str]], together: bool) -> Group:
    """The episodes of one task. `together`: they wait for one another, so that one that fails ends the others."""
    playing = [asyncio.ensure_future(episode) for episode in episodes]
    for future in asyncio.as_completed(playing):
        if isinstance(await future, str) and together:
            for other in playing:
                other.cancel()
            await asyncio.wait(playing)
            break
    return [LOST if each.cancelled() else each.result() for each in playing]


async def _episode(config: Config, play: Plays, ticket: Ticket, renderer: Renderer | None) -> Tried | str:
    """The episode, or why it failed."""
    progress = Progress(time.monotonic())
    try:
        outcome = await asyncio.wait_for(play(ticket, progress), config.actors.most_episode_s)
    except EpisodeFailed as error:
        return str(error)
    except TimeoutError:
        return f"it was not over within {config.actors.most_episode_s:g} s (actors.episode_s, actors.episode_max_s)"
    if isinstance(outcome, ChatResult):
        return of_chat(outcome, time.monotonic() - progress.started)
    assert isinstance(outcome, Trajectory)
    assert renderer is not None
    return of_trajectory(outcome, renderer, progress.prefix_breaks)


def _say_group(group: Group, trial: Trial, say: Callable[[str], None]) -> None:
    for index, episode in enumerate(group):
        say(f"  {episode_line(index + 1, len(group), episode)}")
        if isinstance(episode, Tried) and (trial.show_all or index == 0):
            for line in conversation(episode):
                say(f"  {line}")
    say("")


def _limits(config: Config) -> Limits:
    env, actors = config.env, config.actors
    return Limits(env.max_turns, env.max_tokens, actors.max_new_tokens, actors.tool_calls)


def _ticket(config: Config, number: int, task: Task, index: int, trial: Trial) -> Ticket:
    return Ticket(
        id=TicketId(0, number, index),
        attempt=0,
        kind="train",
        task=task,
        min_version=(0, 0),
        group_size=trial.episodes,
        temperature=config.actors.temperature,
        seed=ticket_seed(config.actors.seed, "train", 0, number, index, 0),
        lease_s=config.buffer.lease_s,
    )
