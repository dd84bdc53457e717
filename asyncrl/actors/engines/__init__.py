"""Engines by name. An entry is an import path, so that a name costs nothing until it is used."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.actors.engines.protocol import Engine
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.plugins import check_options, resolve

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
    try:
        build: Callable[..., Engine] = resolve(config.actors.engine, ENGINES, "actors.engine")
        check_options(build, options, "actors.engine_options", provided=("config",))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return build(config, **options)
