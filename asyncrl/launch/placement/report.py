"""The placement of a run as its launcher shows it: before a start, and under `--dry-run`."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.launch.placement.demand import asks_for_gpus
from asyncrl.launch.placement.machine import gpus_here
from asyncrl.launch.placement.plan import check_asked, fewest, lines, on_nodes, on_this_machine, unused


def before_start(config: Config) -> list[str]:
    """The table, where the run has GPUs. Raises ConfigError for what this machine has no room for."""
    if config.launch.backend == "ray":
        return lines(on_nodes(config, {})) if asks_for_gpus(config) else []
    gpus = gpus_here()
    check_asked(config, gpus)
    return _on(config, gpus) if gpus else []


def planned(config: Config) -> list[str]:
    """The table, on a machine without GPUs for the fewest that the run needs. Raises ConfigError."""
    if config.launch.backend == "ray":
        return ["placement (Ray chooses the nodes):", *lines(on_nodes(config, {}))]
    gpus = gpus_here()
    if gpus or not for_gpus(config):
        return [f"placement on this machine, where torch sees {gpus} GPUs:", *_on(config, gpus)]
    gpus = fewest(config)
    return [f"placement on a machine with {gpus} GPUs (torch sees none on this one):", *_on(config, gpus)]


def for_gpus(config: Config) -> bool:
    """Whether the configuration is meant for a machine with GPUs."""
    return asks_for_gpus(config) or config.actors.engine in ("vllm", "sglang")


def _on(config: Config, gpus: int) -> list[str]:
    return [*lines(on_this_machine(config, gpus)), *filter(None, [unused(config, gpus)])]
