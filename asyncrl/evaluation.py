"""`asyncrl eval`: the held-out tasks played with a checkpoint, in this process, without buffer and learner; or with a
model that is served somewhere.

The episodes are those of the evaluations in a run: the same tasks, the same seeds. What they showed is told for each
environment or data source of the tasks, where there are several, and for all of them.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID

from asyncrl.actors.daemon_threads import use_daemon_threads
from asyncrl.actors.engines import build_engine
from asyncrl.actors.episodes.chat import ServedModel
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.player import chatter, player
from asyncrl.actors.rendering.build import build_renderer
from asyncrl.buffer.tasks.sources import open_source, ticket_seed
from asyncrl.config import Config
from asyncrl.data.base import Task
from asyncrl.errors import ConfigError, RunError
from asyncrl.trajectory import Ticket, TicketId, succeeded

Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Success:
    """Of one way of sampling."""

    share: float
    low: float
    """95% interval"""
    high: float
    tasks: int
    episodes: int
    failed: int
    """Episodes that their environment did not let finish: not counted."""
    reward: float
    """Mean over tasks of their mean reward."""
    reward_half: float
    """Half its 95% interval."""
    pass_at: Mapping[int, float]
    """By k: the chance that at least one of k episodes of a task succeeds; for k = 2, 4, 8, ... up to the episodes."""

    def __str__(self) -> str:
        told = (
            f"{self.share:.1%}  (95%: {self.low:.1%} to {self.high:.1%}; {self.episodes} episodes, {self.tasks} tasks"
        )
        told = f"{told}, {self.failed} failed in their environment)" if self.failed else f"{told})"
        passes = "".join(f"  pass@{k} {share:.1%}" for k, share in self.pass_at.items())
        return f"{told}  reward {self.reward:.3f} ± {self.reward_half:.3f}{passes}"


class Outcome(Protocol):
    """What counts of an episode, as trajectories have it."""

    @property
    def task_id(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Played:
    """One held-out task's episode."""

    source: str
    """The environment of the task in a mix, else its `data_source`, or the environment where it has none."""
    trajectory: Outcome | None
    """None: its environment, or the endpoint, failed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint to play with, as the command line names it."""

    url: str
    served_name: str | None = None
    """None: the one model that it lists."""
    api_key_env: str | None = None
    """The environment variable that holds the key."""


def evaluate(config: Config, model: Path | Endpoint, out: Path | None = None) -> int:
    """Prints held-out success of the model in a folder, a run's checkpoint or Hugging Face's, or at an endpoint; gives
    the exit code.

    `out`: a file that gets the same figures as JSON.
    """
    console = Console(soft_wrap=True)
    config = with_model(config, model) if isinstance(model, Path) else config
    if config.eval.tasks == 0:
        raise ConfigError("eval.tasks is 0: there is nothing to play. Set it to the number of held-out tasks.")
    sampled, greedy = asyncio.run(played(config, model, console))
    played_with = str(model) if isinstance(model, Path) else model.url
    console.print(f"held-out success of {played_with}", highlight=False)
    ways = {f"at temperature {config.actors.temperature:g}": sampled} | ({"greedy": greedy} if greedy else {})
    found = {way: by_source(episodes, config.eval.success) for way, episodes in ways.items()}
    width = max(len(f"{way}, {source}") for way, sources in found.items() for source in sources)
    for way, sources in found.items():
        for source, measured in sources.items():
            name = way if source == ALL else f"{way}, {source}"
            console.print(f"  {name:<{width}}  {measured}", highlight=False)
    if out is not None:
        told = {way: {source: asdict(measured) for source, measured in each.items()} for way, each in found.items()}
        out.write_text(
            json.dumps({"checkpoint" if isinstance(model, Path) else "endpoint": played_with} | told, indent=2) + "\n"
        )
    return 0


def with_model(config: Config, checkpoint: Path) -> Config:
    """The config with the checkpoint's model in place of `model.path`. Raises ConfigError when there is none, and for
    servers that run already: they would play with the weights that they hold, and a run may be using them."""
    if urls := config.actors.engine_options.get("urls"):
        raise ConfigError(
            f"actors.engine_options.urls is {urls!r}: servers that run hold weights of their own, not those of "
            "--checkpoint. Play with an engine that loads it (actors.engine hf, vllm), or serve it and give --endpoint."
        )
    folder = checkpoint / "hf" if (checkpoint / "hf").is_dir() else checkpoint
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--checkpoint is {str(checkpoint)!r}: no config.json in it or in its hf/. Give a folder of "
            "<run>/checkpoints/, or a Hugging Face folder."
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder.absolute())})})


async def played(config: Config, model: Path | Endpoint, console: Console) -> tuple[list[Played], list[Played]]:
    """The episodes at the training temperature, and the greedy ones if `eval.greedy`. Raises ConfigError without
    held-out tasks."""
    use_daemon_threads()
    source = open_source(config)
    if source.held_out_size == 0:
        raise ConfigError(
            f"data.source {config.data.source!r} keeps no task held out: there is nothing to play. Set its option for "
            "held-out tasks in data.options."
        )
    slots = asyncio.Semaphore(config.actors.most_slots)

    async def one(play: Plays, task: int, index: int, bar: Bar, line: TaskID) -> Outcome | None:
        async with slots:
            for attempt in range(config.env.retries + 1):
                try:
                    ticket = _ticket(config, task, source.held_out(task), index, attempt)
                    outcome = await asyncio.wait_for(play(ticket, Progress(time.monotonic())), config.actors.episode_s)
                except (EpisodeFailed, TimeoutError) as error:
                    why = str(error) or f"not over within {config.actors.episode_s:g} s (actors.episode_s)"
                    console.log(f"held-out task {task}, attempt {attempt + 1}: {why}", highlight=False)
                else:
                    bar.advance(line)
                    return outcome
            bar.advance(line)
            return None

    tasks, per_task = min(config.eval.tasks, source.held_out_size), config.eval.samples + config.eval.greedy
    async with _by_checkpoint(config) if isinstance(model, Path) else _by_endpoint(config, model) as play:
        with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
            line = bar.add_task("episodes", total=tasks * per_task)
            every = [(task, index) for task in range(tasks) for index in range(per_task)]
            results = await asyncio.gather(*(one(play, task, index, bar, line) for task, index in every))
    names = [_source_of(config, source.held_out(task)) for task in range(tasks)]
    found = [(index, Played(names[task], t)) for (task, index), t in zip(every, results, strict=True)]
    samples = config.eval.samples
    return [p for index, p in found if index < samples], [p for index, p in found if index >= samples]


Plays = Callable[[Ticket, Progress], Awaitable[Outcome]]
"""One episode. Raises EpisodeFailed."""


@asynccontextmanager
async def _by_checkpoint(config: Config) -> AsyncIterator[Plays]:
    renderer, engine = build_renderer(config), build_engine(config)
    async with player(config, engine, renderer, actor="eval") as play:
        await engine.start()
        try:
            yield play
        finally:
            await engine.close()


@asynccontextmanager
async def _by_endpoint(config: Config, endpoint: Endpoint) -> AsyncIterator[Plays]:
    served = await ServedModel.at(
        endpoint.url, endpoint.served_name, endpoint.api_key_env, config.actors.episode_idle_s
    )
    async with chatter(config, served) as play:
        yield play


def _source_of(config: Config, task: Task) -> str:
    return str((config.env.name == "mix" and task.get("env")) or task.get("data_source") or config.env.name)


ALL = "all"


def by_source(episodes: Sequence[Played], reward: str) -> dict[str, Success]:
    """Success by data source, where there are several, and of all. A source of which every episode failed is left out.

    Raises RunError when all failed.
    """
    sources = sorted({episode.source for episode in episodes})
    found = {}
    for source in sources if len(sources) > 1 else ():
        own = [episode.trajectory for episode in episodes if episode.source == source]
        if any(t is not None for t in own):
            found[source] = success(own, reward)
    return {ALL: success([episode.trajectory for episode in episodes], reward)} | found


def success(trajectories: Sequence[Outcome | None], reward: str) -> Success:
    """By `trajectory.succeeded`, with `reward` the name; None: an episode that failed in its environment. Raises
    RunError when all of them did."""
    finished = [t for t in trajectories if t is not None]
    if not finished:
        raise RunError(f"all {len(trajectories)} episodes failed in their environment: see above for why.")
    by_task: dict[str, list[Outcome]] = {}
    for t in finished:
        by_task.setdefault(t.task_id, []).append(t)
    counts = [(len(own), sum(succeeded(t.reward, t.rewards, reward) for t in own)) for own in by_task.values()]
    share = sum(solved for _, solved in counts) / len(finished)
    # Several samples of one task are not independent: as if they were one, the interval is rather too wide.
    low, high = wilson(share, len(by_task))
    means = [statistics.fmean(t.reward for t in own) for own in by_task.values()]
    half = Z_95 * statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    failed = len(trajectories) - len(finished)
    return Success(
        share, low, high, len(by_task), len(finished), failed, statistics.fmean(means), half, passes_at(counts)
    )


def passes_at(counts: Sequence[tuple[int, int]]) -> dict[int, float]:
    """pass@k for k = 2, 4, 8, ... as far as any task has so many episodes, over the tasks that have.

    `counts`: (episodes, successes) of each task.
    """
    found, k = {}, 2
    while k <= max(n for n, _ in counts):
        found[k] = statistics.fmean(pass_at(k, n, c) for n, c in counts if n >= k)
        k *= 2
    return found


def pass_at(k: int, n: int, c: int) -> float:
    """Chance that k episodes, drawn from n of which c succeeded, hold a success: unbiased (Chen et al., 2107.03374).

    >>> pass_at(1, 4, 1), pass_at(2, 4, 2), pass_at(3, 4, 2)
    (0.25, 0.8333333333333334, 1.0)
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def wilson(share: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Interval of a share observed in n trials (Wilson, 1927): holds near 0 and 1 too.

    >>> tuple(round(x, 3) for x in wilson(0.9, 200))
    (0.851, 0.934)
    >>> tuple(round(x, 3) for x in wilson(1.0, 10))
    (0.722, 1.0)
    """
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # The interval holds the share itself, also where rounding says otherwise.
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))


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
