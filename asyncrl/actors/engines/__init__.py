"""Engines by name. An entry is an import path, so that a name costs nothing until it is used."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.actors.engines.protocol import Engine
from asyncrl.config import Config
from asyncrl.plugins import choose

ENGINES: dict[str, str] = {
    "hf": "asyncrl.actors.engines.hf.engine:from_config",
    "vllm": "asyncrl.actors.engines.vllm.engine:from_config",
    "vllm_server": "asyncrl.actors.engines.vllm.attached:from_config",
    "sglang": "asyncrl.actors.engines.sglang.engine:from_config",
}
"""Name -> import path of a callable `(config: Config, **options) -> Engine`."""


def build_engine(config: Config) -> Engine:
    """The engine that `actors.engine` names, with `actors.engine_options`. Raises ConfigError."""
    options = config.actors.engine_options
    make: Callable[..., Engine] = choose(config.actors.engine, ENGINES, "actors.engine", options, provided=("config",))
    return make(config, **options)
