"""The placement and the memory of a run as its launcher shows them: before a start, and under `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.cards import Card, card_here, cards
from asyncrl.launch.placement.demand import asks_for_gpus
from asyncrl.launch.placement.machine import gpus_here
from asyncrl.launch.placement.memory import Budget, budget, details, refuse_or_warn, with_memory
from asyncrl.launch.placement.plan import (
    Placed,
    check_asked,
    fewest,
    lines,
    on_nodes,
    on_this_machine,
    unused,
)

MOST_NODES = 256


def before_start(config: Config) -> list[str]:
    """The table, where the run has GPUs; under `launch.backend: local` with the memory that is planned. Raises
    ConfigError for what this machine has no room for, and under `launch.memory_check: refuse` for what does not fit."""
    if config.launch.backend == "ray":
        return lines(on_nodes(config, {})) if asks_for_gpus(config) else []
    gpus = gpus_here()
    check_asked(config, gpus)
    if not gpus:
        return []
    placed = on_this_machine(config, gpus)
    idle = unused(config, gpus)
    here = card_here() if config.launch.memory_check != "off" else None
    if here is None:
        return [*lines(placed), *filter(None, [idle])]
    return [*_checked(config, here, placed), *filter(None, [idle])]


def planned(config: Config, *, memory: bool = False, gpu: str | None = None) -> list[str]:
    """The table, on a machine without GPUs for the fewest that the run needs; `memory`: with the memory of each
    process on a card, by name or of this machine. Raises ConfigError."""
    if gpu is not None and not memory:
        raise ConfigError(f"--gpu is {gpu!r} without --memory: give both to compare the memory with that card.")
    chosen, count = cards(gpu) if gpu is not None else (None, None)
    title, placed, idle = _planned(config, count)
    if not memory:
        return [title, *lines(placed), *filter(None, [idle])]
    chosen = chosen or card_here()
    if chosen is None:
        raise ConfigError("--memory: this machine has no GPU to compare with; name one, such as --gpu h100-80gb.")
    from asyncrl.learner.budget.memory import model_config

    found = _computed(config, model_config(config), chosen, placed)
    return [title, *lines(with_memory(placed, found)), *filter(None, [idle]), *details(config, found)]


def for_gpus(config: Config) -> bool:
    """Whether the configuration is meant for a machine with GPUs."""
    return asks_for_gpus(config) or config.actors.engine in ("vllm", "sglang")


def _planned(config: Config, count: int | None) -> tuple[str, list[Placed], str]:
    """A title, the rows, and a sentence about GPUs that nothing uses."""
    if config.launch.backend == "ray":
        if count is None:
            return "placement (Ray chooses the nodes):", on_nodes(config, {}), ""
        nodes = {f"node-{i}": count for i in range(MOST_NODES)}
        return f"placement on empty nodes with {count} GPUs each (Ray decides):", on_nodes(config, nodes), ""
    if count is not None:
        return f"placement on a machine with {count} GPUs:", on_this_machine(config, count), unused(config, count)
    gpus = gpus_here()
    title = f"placement on this machine, where torch sees {gpus} GPUs:"
    if not gpus and for_gpus(config):
        gpus = fewest(config)
        title = f"placement on a machine with {gpus} GPUs (torch sees none on this one):"
    return title, on_this_machine(config, gpus), unused(config, gpus)


def _checked(config: Config, here: Card, placed: Sequence[Placed]) -> list[str]:
    """The table with its memory, and warnings. Raises ConfigError."""
    from asyncrl.learner.budget.memory import BUDGETED, model_config

    if config.learner.backend not in BUDGETED:
        return [*lines(placed), f"the memory of learner.backend {config.learner.backend} is not computed"]
    try:
        found = _computed(config, model_config(config), here, placed)
    except ConfigError as error:
        return [*lines(placed), f"memory is not checked: {error}"]
    return [*lines(with_memory(placed, found)), *(f"warning: {said}" for said in refuse_or_warn(config, found))]


def _computed(config: Config, model: Any, card: Card, placed: Sequence[Placed]) -> Budget:
    """`model`: its transformers config. Raises ConfigError also for a model whose pass needs data: whose shapes depend
    on values, or that is no causal language model."""
    try:
        return budget(config, model, card, placed)
    except ConfigError:
        raise
    except Exception as error:  # the code of any model, on tensors without data
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(
            f"model.path is {config.model.path!r}, a {type(model).__name__}, and its training step cannot be computed "
            f"without data ({reason:.200}); launch.memory_check off leaves the check out."
        ) from error
