"""`asyncrl eval`: plays the held-out tasks with a checkpoint, in this process, without buffer and learner; or with a
served model.

The episodes are those of the evaluations in a run: the same tasks, the same seeds. Success is given over all tasks and,
where they come from several environments or data sources, for each of these.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bar

from asyncrl.actors.engines import build_engine
from asyncrl.actors.episodes.chat import ServedModel
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.player import chatter, for_held_out, player
from asyncrl.buffer.tasks.drawing import checked_task
from asyncrl.buffer.tasks.sources import open_source, ticket_seed
from asyncrl.config import Config
from asyncrl.config.held_out import HeldOutSet, every_set
from asyncrl.data.base import Task, TaskSource
from asyncrl.data.checked import readable
from asyncrl.errors import ConfigError
from asyncrl.process.daemon_threads import use_daemon_threads
from asyncrl.rendering.build import build_renderer
from asyncrl.success import Outcome, Success, success
from asyncrl.trajectory import Ticket, TicketId


@dataclass(frozen=True, slots=True)
class Played:
    """One held-out task's episode."""

    source: str
    """In a mix: the task's environment; else its `data_source`, or the environment where it has none."""
    trajectory: Outcome | None
    """None: its environment, or the endpoint, failed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint that serves the model."""

    url: str
    served_name: str | None = None
    """None: the one model that it lists."""
    api_key_env: str | None = None
    """The environment variable that holds the key."""
    option: str = "--endpoint"
    """The command's option that gave the URL, for errors."""


def evaluate(config: Config, model: Path | Endpoint, out: Path | None = None, only: str | None = None) -> int:
    """Prints the held-out success of the model in a folder (a run's checkpoint, or Hugging Face's) or at an endpoint;
    gives the exit code.

    `out`: a file for the same figures as JSON. `only`: the one set to play, by its name.
    """
    console = Console(soft_wrap=True)
    config = with_model(config, model) if isinstance(model, Path) else config
    sets = _chosen(config, only)
    measured: dict[str, dict[str, Success]] = {}
    for held_out in sets:
        measured |= _measured(config, held_out, model, console, f"{held_out.name}, " if len(sets) > 1 else "")
    kind, name = ("checkpoint", str(model)) if isinstance(model, Path) else ("endpoint", model.url)
    console.print(f"held-out success of {name}", highlight=False)
    _show(measured, console)
    if out is not None:
        figures = {way: {source: asdict(each) for source, each in sources.items()} for way, sources in measured.items()}
        told = {kind: name} | ({"set": only} if only else {})
        out.write_text(json.dumps(told | figures, indent=2) + "\n")
    return 0


def _chosen(config: Config, only: str | None) -> tuple[HeldOutSet, ...]:
    """The held-out sets to play; with `only`, the one of that name. Raises ConfigError if there is none."""
    if not (sets := every_set(config)):
        raise ConfigError("eval.tasks is 0: there is nothing to play. Set it to the number of held-out tasks.")
    if only is None:
        return sets
    if not (chosen := tuple(each for each in sets if each.name == only)):
        known = ", ".join(each.name for each in sets)
        raise ConfigError(f"--set is {only!r}, expected a held-out set of the configuration: {known}.")
    return chosen


def _measured(
    config: Config, held_out: HeldOutSet, model: Path | Endpoint, console: Console, of_set: str
) -> dict[str, dict[str, Success]]:
    """The success on one set by way of playing it and by source; `of_set` begins the name of each way."""
    sampled, greedy = asyncio.run(play_held_out(for_held_out(config, held_out.name), model, console))
    measured = {f"{of_set}at temperature {held_out.temperature:g}": by_source(sampled, held_out)}
    if greedy:
        measured[f"{of_set}greedy"] = by_source(greedy, held_out)
    return measured


def _show(measured: dict[str, dict[str, Success]], console: Console) -> None:
    rows = {
        way if source == ALL else f"{way}, {source}": each
        for way, sources in measured.items()
        for source, each in sources.items()
    }
    width = max(map(len, rows))
    for row, each in rows.items():
        console.print(f"  {row:<{width}}  {each}", highlight=False)


def with_model(config: Config, checkpoint: Path) -> Config:
    """The config with the checkpoint's model in place of `model.path`. Raises ConfigError when there is none, and for
    running servers: they would play with their own weights, and a run may be using them."""
    if urls := config.actors.engine_options.get("urls"):
        raise ConfigError(
            f"actors.engine_options.urls is {urls!r}: running servers hold weights of their own, not those of "
            "--checkpoint. Play with an engine that loads it (actors.engine hf, vllm), or serve it and give --endpoint."
        )
    folder = checkpoint / "hf" if (checkpoint / "hf").is_dir() else checkpoint
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--checkpoint is {str(checkpoint)!r}: no config.json in it or in its hf/. Give a folder of "
            "<run>/checkpoints/, or a Hugging Face folder."
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder.absolute())})})


async def play_held_out(config: Config, model: Path | Endpoint, console: Console) -> tuple[list[Played], list[Played]]:
    """The episodes at the training temperature, and the greedy ones if `eval.greedy`. Raises ConfigError without
    held-out tasks."""
    use_daemon_threads()
    source = open_source(config)
    if source.held_out_size == 0:
        raise ConfigError(
            f"data.source {config.data.source!r} keeps no task held out: there is nothing to play. Set its option for "
            "held-out tasks in data.options."
        )
    samples, per_task = config.eval.samples, config.eval.samples + config.eval.greedy
    tasks = [_held_out(source, number) for number in range(min(config.eval.tasks, source.held_out_size))]
    episodes = [(number, index) for number in range(len(tasks)) for index in range(per_task)]
    slots = asyncio.Semaphore(config.actors.most_slots)
    async with by_checkpoint(config) if isinstance(model, Path) else by_endpoint(config, model) as play:
        with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
            line = bar.add_task("episodes", total=len(episodes))

            async def one(number: int, index: int) -> Played:
                async with slots:
                    trajectory = await _played(config, play, console, number, tasks[number], index)
                bar.advance(line)
                return Played(_source_of(config, tasks[number]), trajectory)

            results = await asyncio.gather(*(one(number, index) for number, index in episodes))
    at = list(zip(episodes, results, strict=True))
    return [p for (_, index), p in at if index < samples], [p for (_, index), p in at if index >= samples]


def _held_out(source: TaskSource, number: int) -> Task:
    """One that the source cannot give fails in the player, as in a run. Raises RunError for one that no ticket can
    carry."""
    place = f"held-out task {number}"
    return checked_task(readable(lambda: source.held_out(number), place), place)


async def _played(config: Config, play: Plays, console: Console, number: int, task: Task, index: int) -> Outcome | None:
    """Plays one episode, again after a failure up to `env.retries` times; None: every attempt failed."""
    for attempt in range(config.env.retries + 1):
        try:
            ticket = _ticket(config, number, task, index, attempt)
            return await asyncio.wait_for(play(ticket, Progress(time.monotonic())), config.actors.most_episode_s)
        except (EpisodeFailed, TimeoutError) as error:
            limit = f"{config.actors.most_episode_s:g} s (actors.episode_s, actors.episode_max_s)"
            why = str(error) or f"not over within {limit}"
            console.log(f"held-out task {number}, attempt {attempt + 1}: {why}", highlight=False)
    return None


Plays = Callable[[Ticket, Progress], Awaitable[Outcome]]
"""Plays one episode. Raises EpisodeFailed."""


@asynccontextmanager
async def by_checkpoint(config: Config) -> AsyncIterator[Plays]:
    """Plays with `model.path`, in this process. Raises ConfigError."""
    renderer, engine = build_renderer(config), build_engine(config)
    async with player(config, engine, renderer, actor="eval") as play:
        await engine.start()
        try:
            yield play
        finally:
            await engine.close()


@asynccontextmanager
async def by_endpoint(config: Config, endpoint: Endpoint) -> AsyncIterator[Plays]:
    """Plays with a served model, whose tokens are not seen. Raises ConfigError."""
    named = endpoint.url, endpoint.served_name, endpoint.api_key_env
    served = await ServedModel.at(*named, config.actors.episode_idle_s, endpoint.option)
    async with chatter(config, served) as play:
        yield play


def _source_of(config: Config, task: Task) -> str:
    return str((config.env.name == "mix" and task.get("env")) or task.get("data_source") or config.env.name)


ALL = "all"


def by_source(episodes: Sequence[Played], held_out: HeldOutSet) -> dict[str, Success]:
    """Success over all episodes, and by data source where there are several. A source whose episodes all failed is
    left out.

    Raises RunError when all failed.
    """
    reward, pass_at = held_out.success, held_out.pass_at
    measured = {ALL: success([episode.trajectory for episode in episodes], reward, pass_at)}
    sources = sorted({episode.source for episode in episodes})
    for source in sources if len(sources) > 1 else ():
        own = [episode.trajectory for episode in episodes if episode.source == source]
        if any(t is not None for t in own):
            measured[source] = success(own, reward, pass_at)
    return measured


def _ticket(config: Config, task: int, held_out: Task, index: int, attempt: int) -> Ticket:
    return Ticket(
        id=TicketId(0, task, index),
        attempt=attempt,
        kind="eval",
        task=held_out,
        min_version=(0, 0),
        group_size=config.eval.samples + config.eval.greedy,
        temperature=config.actors.temperature if index < config.eval.samples else 0.0,
        seed=ticket_seed(config.actors.seed, "eval", 0, task, index, attempt),
        lease_s=config.buffer.lease_s,
    )
