"""`asyncrl eval`: the held-out tasks played with a checkpoint, in this process, without buffer and learner.

The episodes are those of the evaluations in a run: the same tasks, the same seeds.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID

from asyncrl.actors.engines import build_engine
from asyncrl.actors.episode import EpisodeFailed, Progress
from asyncrl.actors.playing import Play, player
from asyncrl.actors.renderer_choice import build_renderer
from asyncrl.buffer.cursor import open_source, ticket_seed
from asyncrl.config import Config
from asyncrl.data.base import Task
from asyncrl.errors import ConfigError, RunError
from asyncrl.trajectory import Ticket, TicketId, Trajectory

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

    def __str__(self) -> str:
        told = (
            f"{self.share:.1%}  (95%: {self.low:.1%} to {self.high:.1%}; {self.episodes} episodes, {self.tasks} tasks"
        )
        return f"{told}, {self.failed} failed in their environment)" if self.failed else f"{told})"


def evaluate(config: Config, checkpoint: Path) -> int:
    """Prints held-out success of the model in `checkpoint`, a run's or a Hugging Face folder; gives the exit code."""
    console = Console()
    config = with_model(config, checkpoint)
    if config.eval.tasks == 0:
        raise ConfigError("eval.tasks is 0: there is nothing to play. Set it to the number of held-out tasks.")
    sampled, greedy = asyncio.run(played(config, console))
    console.print(f"held-out success of {checkpoint}", highlight=False)
    console.print(f"  at temperature {config.actors.temperature:g}  {sampled}", highlight=False)
    if greedy is not None:
        console.print(f"  greedy            {greedy}", highlight=False)
    return 0


def with_model(config: Config, checkpoint: Path) -> Config:
    """The config with the checkpoint's model in place of `model.path`. Raises ConfigError when there is none."""
    folder = checkpoint / "hf" if (checkpoint / "hf").is_dir() else checkpoint
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--checkpoint is {str(checkpoint)!r}: no config.json in it or in its hf/. Give a folder of "
            "<run>/checkpoints/, or a Hugging Face folder."
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder.absolute())})})


async def played(config: Config, console: Console) -> tuple[Success, Success | None]:
    """Success at the training temperature, and greedily if `eval.greedy`. Raises ConfigError without held-out tasks,
    RunError when no episode finished."""
    source = open_source(config)
    if source.held_out_size == 0:
        raise ConfigError(
            f"data.source {config.data.source!r} keeps no task held out: there is nothing to play. Set its option for "
            "held-out tasks in data.options."
        )
    renderer, engine = build_renderer(config), build_engine(config)
    slots = asyncio.Semaphore(config.actors.slots)

    async def one(play: Play, task: int, index: int, bar: Bar, line: TaskID) -> Trajectory | None:
        async with slots:
            for attempt in range(config.env.retries + 1):
                try:
                    ticket = _ticket(config, task, source.held_out(task), index, attempt)
                    trajectory = await asyncio.wait_for(
                        play(ticket, Progress(time.monotonic())), config.actors.episode_s
                    )
                except (EpisodeFailed, TimeoutError) as error:
                    console.log(f"held-out task {task}, attempt {attempt + 1}: {error}", highlight=False)
                else:
                    bar.advance(line)
                    return trajectory
            bar.advance(line)
            return None

    tasks, per_task = min(config.eval.tasks, source.held_out_size), config.eval.samples + config.eval.greedy
    async with player(config, engine, renderer, actor="eval") as play:
        await engine.start()
        try:
            with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
                line = bar.add_task("episodes", total=tasks * per_task)
                every = [(task, index) for task in range(tasks) for index in range(per_task)]
                results = await asyncio.gather(*(one(play, task, index, bar, line) for task, index in every))
        finally:
            await engine.close()
    sampled = [t for (_, index), t in zip(every, results, strict=True) if index < config.eval.samples]
    greedy = [t for (_, index), t in zip(every, results, strict=True) if index >= config.eval.samples]
    reward = config.eval.success
    return success(sampled, reward), success(greedy, reward) if greedy else None


def success(trajectories: Sequence[Trajectory | None], reward: str) -> Success:
    """An episode succeeds when the named reward (the whole one, where it has none of the name) is 1; None: it failed in
    its environment. Raises RunError when all of them did."""
    finished = [t for t in trajectories if t is not None]
    if not finished:
        raise RunError(f"all {len(trajectories)} episodes failed in their environment: see above for why.")
    share = statistics.fmean(t.rewards.get(reward, t.reward) >= 1 for t in finished)
    tasks = len({t.task_id for t in finished})
    # Several samples of one task are not independent: as if they were one, the interval is rather too wide.
    low, high = wilson(share, tasks)
    return Success(share, low, high, tasks, len(finished), len(trajectories) - len(finished))


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
