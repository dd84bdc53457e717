"""Checks that the engine's package is installed, and that a model of the hub can be had. Loads no model library."""

from __future__ import annotations

import importlib.util

from asyncrl.actors.engines import ENGINES
from asyncrl.actors.engines.vllm.settings import INSTALL
from asyncrl.config import Config, ModelConfig
from asyncrl.config.teacher import scored_by_servers
from asyncrl.errors import ConfigError
from asyncrl.model import local_path, teacher_folder

HUB_S = 5.0
"""Seconds that the hub has to answer."""


def check_engine(config: Config) -> None:
    """Raises ConfigError for an engine that is unknown, or whose package is missing here."""
    name = config.actors.engine
    if name not in ENGINES and ":" not in name:
        raise ConfigError(
            f"actors.engine is {name!r}: expected one of {', '.join(ENGINES)}, or an import path 'package.module:Name'."
        )
    if config.launch.backend == "ray":  # actors are on other hosts
        return
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(INSTALL)
    if name in ("vllm_server", "sglang") and importlib.util.find_spec("httpx") is None:
        extra = name.replace("_", "-")
        raise ConfigError(f"actors.engine is {name}, which needs httpx: pip install 'asyncrl[{extra}]'.")


def check_teacher(config: Config) -> None:
    """Raises ConfigError for a teacher's folder that holds no model; a hub name is left to the learner."""
    path = config.learner.teacher.path
    if scored_by_servers(config) and importlib.util.find_spec("httpx") is None:
        raise ConfigError(
            "learner.teacher.scored_by is servers, which needs httpx: pip install 'asyncrl[vllm-server]'."
        )
    if not path or config.learner.teacher.moves or config.launch.backend == "ray":
        return
    if path == "quickstart" or local_path(ModelConfig(path=path), "learner.teacher.path") is not None:
        teacher_folder(path)


def check_hub(config: Config) -> None:
    """Raises ConfigError for a hub name that is neither in the cache nor at the hub."""
    name = config.model.path
    if name == "quickstart" or local_path(config.model) is not None or config.launch.backend == "ray":
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        HfApi().model_info(name, timeout=HUB_S)
    # Besides OSError, the hub's client lets errors of httpx through where there is no network.
    except Exception as error:
        kind = "no hub name" if isinstance(error, HFValidationError) else type(error).__name__
        raise ConfigError(
            f"model.path is {name!r}: no folder has that name, it is not in the cache, and the hub does not provide it "
            f"({kind}). Give a folder with config.json, or a hub name that this machine can reach (a gated model: log "
            "in with `hf auth login`)."
        ) from error
