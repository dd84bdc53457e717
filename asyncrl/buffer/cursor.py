"""The seeded order of draws: a draw is (epoch, position), and everything about it follows from its index.

The task source owns the order within an epoch (seeded by `data.seed`), so the ledger keeps one number, the index of
the next draw, and an audit recomputes every task from it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from asyncrl.config import Config
from asyncrl.data import SOURCES
from asyncrl.data.base import TaskSource
from asyncrl.errors import ConfigError
from asyncrl.plugins import check_options, resolve


def draw_of(index: int, size: int | None) -> tuple[int, int]:
    """(epoch, position) of the draw at `index`. A source without end stays in epoch 0.

    >>> draw_of(7, 5), draw_of(7, None)
    ((1, 2), (0, 7))
    """
    return (0, index) if size is None else divmod(index, size)


def ticket_seed(seed: int, kind: str, branch: int, group: int, index: int, attempt: int) -> int:
    """Of one attempt's sampling and environment: 0 <= seed < 2**63, the same whenever it is asked for."""
    text = f"{seed}/{kind}/{branch}/{group}/{index}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def open_source(config: Config) -> TaskSource:
    """`data.source` with `data.options`; a source that takes `seed` or `model` gets `data.seed` or `model.path`.

    Raises ConfigError.
    """
    name = config.data.source
    try:
        make: Callable[..., Any] = resolve(name, SOURCES, "data.source")
        parameters = inspect.signature(make).parameters
        given = {"seed": config.data.seed, "model": config.model.path}
        provided = {n: value for n, value in given.items() if n in parameters and n not in config.data.options}
        check_options(make, config.data.options, "data.options", provided)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    source: TaskSource = make(**provided, **config.data.options)
    if source.train_size is not None and source.train_size < 1:
        raise ConfigError(f"data.source {name!r} has {source.train_size} training tasks; at least one is needed.")
    return source
