"""The buffer's settings, taken from the config; names of samplers and filters are replaced by their functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.buffer.bounds.automatic import Auto
from asyncrl.buffer.bounds.slots import SlotLimits
from asyncrl.buffer.replaying import Replaying
from asyncrl.buffer.selection import FILTERS, SAMPLERS, Filter, Sampler, fifo
from asyncrl.buffer.staleness import OverAge
from asyncrl.config import Config, resuming
from asyncrl.config.choosing import Choosing
from asyncrl.config.demonstrations import demonstrations_per_step, groups_per_step
from asyncrl.config.held_out import HeldOutSet, held_out_sets
from asyncrl.config.teacher import scored_by_servers, words_scored
from asyncrl.errors import ConfigError
from asyncrl.plugins import resolve
from asyncrl.trajectory.kept_ids import MAX_KEPT


class Refused(Exception):
    """A request that cannot be met: the client gets code and message, and nothing changes; but a put that is refused
    ends the attempt, if its actor holds it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Rules:
    steps: int
    groups_per_step: int
    group_size: int
    capacity: int
    demonstrations_per_step: int = 0
    max_staleness: int = 2
    """Where `auto` is None."""
    auto: Auto | None = None
    """`buffer.max_staleness: auto`"""
    tuning: SlotLimits | None = None
    """`launch.tuning: auto`"""
    over_age: OverAge = "drop"
    requeue: bool = True
    wait_s: float = 60.0
    mask_min_kept: float = 0.5
    sampler: Sampler = fifo
    max_uses: int = 1
    replay: Replaying | None = None
    scored: bool = False
    """Groups need the scores of a teacher on servers (`learner.teacher.scored_by`)."""
    score_k: int = 0
    """Least number of words of each token in them."""
    filters: tuple[Filter, ...] = ()
    filter_max_ratio: float = 4.0
    end_when_starved: bool = False
    lease_s: float = 30.0
    max_disk_bytes: float = float("inf")
    keep_all: bool = False
    batch_retries: int = 2
    max_skipped: int = 3
    keep_checkpoints: int = 2
    env_retries: int = 2
    group_scored: bool = False
    """One actor plays all trajectories of a group, and scores them together before it puts any (`env.group_score`)."""
    max_failures: float = 1.0
    failure_window: int = 100
    stop_on_failures: bool = False
    stop_if_all_fail: bool = False
    temperature: float = 1.0
    greedy_first: bool = False
    """The first trajectory of a group is sampled greedily."""
    actors_seed: int = 0
    data_seed: int = 0
    eval_sets: tuple[HeldOutSet, ...] = ()
    eval_every: int = 0
    eval_reserved: int = 0
    """Actors that play evaluations only (`actors.eval`)."""
    eval_share: float = 0.25
    choosing: Choosing = field(default_factory=Choosing)
    ranks: int = 1
    slots: int = 64
    """Most episodes of one actor."""
    row_tokens: int = 1 << 31
    """Most tokens of one row."""
    max_kept: int = MAX_KEPT
    """Most kept ids of one token."""
    durable: bool = False
    """Turns of new groups' episodes are recorded (`buffer.turns`)."""
    turns_auto_s: float | None = None
    """The 90th percentile of episode time above which they are (`buffer.turns: auto`); None: `durable` says it."""
    mixed: bool = False
    """Each task names its environment (`env.name: mix`)."""
    turn_bytes: int = 1 << 20
    """Most bytes of one recorded turn, its snapshot included."""
    settings: str = "{}"
    """JSON: what decides the result of a training step (`asyncrl.config.resuming`)."""

    def env_of(self, task: Mapping[str, Any]) -> str:
        """The environment that a task of a mix names; empty: there is one for all."""
        return str(task.get("env", "mix")) if self.mixed else ""

    @classmethod
    def of(cls, c: Config) -> Rules:
        """Raises ConfigError for an unknown sampler, priority or filter."""
        try:
            sampler = resolve(c.buffer.sampler, SAMPLERS, "buffer.sampler")
            filters = tuple(resolve(name, FILTERS, "buffer.filters") for name in c.buffer.filters)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return cls(
            steps=c.learner.steps,
            groups_per_step=groups_per_step(c),
            demonstrations_per_step=demonstrations_per_step(c),
            group_size=c.learner.group_size,
            capacity=c.buffer.capacity,
            max_staleness=c.buffer.most_staleness,
            auto=Auto.of(c),
            tuning=SlotLimits.of(c),
            over_age=c.buffer.over_age,
            requeue=c.buffer.requeue,
            wait_s=c.buffer.wait_s,
            mask_min_kept=c.buffer.mask_min_kept,
            sampler=sampler,
            max_uses=c.buffer.max_uses,
            replay=Replaying.of(c),
            scored=scored_by_servers(c),
            score_k=words_scored(c),
            filters=filters,
            filter_max_ratio=c.buffer.filter_max_ratio,
            end_when_starved=c.buffer.on_starved == "end",
            lease_s=c.buffer.lease_s,
            max_disk_bytes=c.buffer.max_disk_gb * 1e9,
            keep_all=c.buffer.keep == "all",
            durable=c.buffer.turns == "on",
            turns_auto_s=c.buffer.turns_auto_s if c.buffer.turns == "auto" else None,
            mixed=c.env.name == "mix",
            turn_bytes=c.buffer.turn_max_kb << 10,
            batch_retries=c.learner.batch_retries,
            max_skipped=c.learner.max_skipped,
            keep_checkpoints=c.learner.keep_checkpoints,
            env_retries=c.env.retries,
            group_scored=bool(c.env.group_score),
            max_failures=c.env.max_failures,
            failure_window=c.env.failure_window,
            stop_on_failures=c.env.on_failures == "stop",
            stop_if_all_fail=c.env.on_failures != "warn",
            temperature=c.actors.temperature,
            greedy_first=c.learner.greedy_baseline,
            actors_seed=c.actors.seed,
            data_seed=c.data.seed,
            eval_sets=held_out_sets(c),
            eval_every=c.eval.every,
            eval_reserved=c.actors.eval,
            eval_share=c.eval.share,
            choosing=Choosing.of(c),
            ranks=c.learner.ranks,
            slots=c.actors.most_slots,
            row_tokens=c.env.max_tokens + c.actors.max_new_tokens,
            max_kept=c.actors.max_kept,
            settings=resuming.text(c),
        )
