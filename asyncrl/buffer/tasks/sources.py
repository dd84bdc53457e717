"""The tasks of a run: the source, and the curriculum that chooses the tasks of draws 0, 1, 2 ...

Both are seeded by `data.seed`, so the ledger keeps the number of the next draw and the curriculum's states, and an
audit recomputes every task from them.
"""

from __future__ import annotations

import hashlib

from asyncrl.config import Config
from asyncrl.config.held_out import for_set
from asyncrl.data import SOURCES
from asyncrl.data.base import Curriculum, TaskSource
from asyncrl.data.checked import check_members
from asyncrl.data.curricula import CURRICULA
from asyncrl.data.group_sizes import GroupSizes
from asyncrl.errors import ConfigError
from asyncrl.plugins import build
from asyncrl.redaction import resolved


def ticket_seed(seed: int, kind: str, branch: int, group: int, index: int, attempt: int) -> int:
    """Seed of one attempt's sampling and environment: 0 <= seed < 2**63, a function of its arguments."""
    text = f"{seed}/{kind}/{branch}/{group}/{index}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def open_source(config: Config) -> TaskSource:
    """`data.source` with `data.options`; a source that takes `seed` or `model` gets `data.seed` or `model.path`.

    Raises ConfigError.
    """
    defaults = {"seed": config.data.seed, "model": config.model.path}
    try:
        options = resolved(config.data.options)
    except ValueError as error:
        raise ConfigError(f"data.options: {error}") from error
    source: TaskSource = build(
        config.data.source, SOURCES, "data.source", options, options_field="data.options", defaults=defaults
    )
    check_members(source, "data.source", config.data.source)
    if source.train_size is not None and source.train_size < 1:
        raise ConfigError(
            f"data.source {config.data.source!r} has {source.train_size} training tasks; at least one is needed."
        )
    _check_sizes(config, GroupSizes(source, config.learner.group_size))
    return source


def open_held_out(config: Config) -> dict[str, TaskSource]:
    """The sources of those held-out sets that have one of their own, by the name of the set. Raises ConfigError."""
    sources = {}
    for name, given in config.eval.sets.items():
        if given.source:
            sources[name] = open_source(for_set(config, name))
            if not sources[name].held_out_size:
                raise ConfigError(
                    f"eval.sets.{name}.source {given.source!r} keeps no task held out: there is nothing to play. Set "
                    f"its option for held-out tasks in eval.sets.{name}.source_options."
                )
    return sources


def _check_sizes(config: Config, sizes: GroupSizes) -> None:
    """Checks the config against the group sizes, which only the source knows. Raises ConfigError."""
    batch = config.learner.groups_per_step * sizes.largest
    if config.buffer.capacity < batch:
        raise ConfigError(
            f"buffer.capacity is {config.buffer.capacity} trajectories but a batch may hold learner.groups_per_step = "
            f"{config.learner.groups_per_step} groups of {sizes.largest}, the largest group_size in data.options: "
            f"raise buffer.capacity to at least {batch}."
        )
    if config.learner.greedy_baseline and sizes.smallest < 2:
        raise ConfigError(
            "learner.greedy_baseline takes one trajectory of every group, and data.options has a group_size of "
            f"{sizes.smallest}: raise it to at least 2."
        )


def open_curriculum(config: Config, source: TaskSource) -> Curriculum:
    """`data.curriculum` with `data.curriculum_options`; gets `data.seed` as `seed` and the source's `train_size` if it
    takes them. Raises ConfigError."""
    defaults = {"seed": config.data.seed, "train_size": source.train_size}
    name, options = config.data.curriculum, config.data.curriculum_options
    curriculum: Curriculum = build(name, CURRICULA, "data.curriculum", options, defaults=defaults)
    return curriculum
