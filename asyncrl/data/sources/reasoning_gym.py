"""Procedural tasks of the package reasoning-gym (pip install reasoning-gym): a hundred kinds, unlimited, no download.

Scored by the score `reasoning_gym`, which makes the task again from its number instead of carrying it along.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from asyncrl.data.sources.generated import GeneratedSource
from asyncrl.errors import ConfigError

INSTRUCTION = "\nGive the final answer between <answer> and </answer>."
_SIZE = 2**31 - 1
"""Size given to every dataset: its entries are made on request."""


class ReasoningGymSource(GeneratedSource):
    """One kind of task, with its difficulty set by `config`."""

    def __init__(
        self,
        dataset: str,
        *,
        config: dict[str, Any] | None = None,
        levels: list[dict[str, Any]] | None = None,
        instruction: str = INSTRUCTION,
        held_out_size: int = 100,
        seed: int = 0,
    ) -> None:
        """
        Args:
            dataset: its name in reasoning-gym, e.g. `chain_sum`.
            config: the dataset's own options. Those that make all their entries at once (acre, gsm_symbolic,
                list_functions, sokoban, word_ladder) need `size`, e.g. 5000.
            levels: further options of each level, the easiest first, for `data.curriculum: levels`.
            instruction: put behind every question; the score looks for what it asks for.
            held_out_size: how many tasks are kept out of training; none of their prompts is trained on.
        Raises ConfigError when reasoning-gym has no such dataset or refuses the options.
        """
        configs = [{**(config or {}), **level} for level in levels or [{}]]
        try:
            for one in configs:
                entry(dataset, json.dumps(one), 0)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"data.source reasoning_gym needs the package: {error}. pip install reasoning-gym"
            ) from error
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"data.options.dataset is {dataset!r} with config {one}, which reasoning-gym refuses: {error}"
            ) from error
        options = {"dataset": dataset, "configs": configs, "instruction": instruction}
        super().__init__(
            f"{__name__}:make", options=options, levels=len(configs), held_out_size=held_out_size, seed=seed
        )


def make(
    rng: random.Random, dataset: str, configs: Sequence[Mapping[str, Any]], instruction: str, level: int
) -> dict[str, Any]:
    """The configuration of a level; beyond the last level, that of the last."""
    config = configs[min(level, len(configs) - 1)]
    index, text = rng.randrange(config.get("size", _SIZE)), json.dumps(config)
    made = entry(dataset, text, index)
    return {
        "id": f"{dataset}-{index}",
        "prompt": made["question"] + instruction,
        "data_source": f"reasoning_gym/{dataset}",
        "ground_truth": made["answer"],
        "extra_info": {"dataset": dataset, "config": text, "index": index},
    }


def entry(dataset: str, config: str, index: int) -> Mapping[str, Any]:
    """reasoning-gym's question, answer and metadata."""
    made: Mapping[str, Any] = opened(dataset, config)[index]
    return made


@lru_cache(maxsize=16)
def opened(name: str, config: str) -> Any:
    """reasoning-gym's dataset. `config`: its options as JSON."""
    import reasoning_gym as package

    return package.create_dataset(name, **{"seed": 0, "size": _SIZE, **json.loads(config)})
