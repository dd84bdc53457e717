"""Builds what a learner's config names, its objective and its backend, without a model, data or processes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from asyncrl.config import Config
from asyncrl.config.learner import POLICY
from asyncrl.config.rules import uncorrected
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.backends.protocol import Backend, MovesTeacher
from asyncrl.learner.losses import LOSSES, properties_of
from asyncrl.learner.objective.objective import Objective
from asyncrl.plugins import resolve


def fsdp2(config: Config) -> Backend:
    from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend  # a second of imports

    return Fsdp2Backend(config)


def megatron(config: Config) -> Backend:
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise ConfigError("learner.backend is megatron, which is not installed: pip install 'asyncrl[megatron]'.")
    from asyncrl.learner.backends.megatron.backend import MegatronBackend  # seconds of imports

    return MegatronBackend(config)


def refuse_incomplete(config: Config, backend: Backend) -> None:
    """Raises ConfigError where the backend, one of the user's own, lacks something of the protocol."""
    methods = (name for name in vars(Backend) if not name.startswith("_"))
    if missing := [name for name in ("dp_size", *methods) if not hasattr(backend, name)]:
        raise ConfigError(
            f"learner.backend {config.learner.backend} lacks {', '.join(missing)}: add what is described under "
            f"`{Backend.__name__}` in asyncrl/learner/backends/protocol.py."
        )


def refuse_without_teacher(config: Config, backend: Backend) -> None:
    """Raises ConfigError where the config has a teacher and the backend, one of the user's own, has none."""
    taught = config.learner.teacher.path and config.learner.teacher.scored_by == "learner"
    if taught and not getattr(backend, "teacher_digest", ""):
        raise ConfigError(
            f"learner.teacher.path is {config.learner.teacher.path!r}, and learner.backend {config.learner.backend} "
            "has no teacher (`teacher_digest`): use learner.backend torch, fsdp2 or megatron."
        )
    if config.learner.teacher.moves and not hasattr(backend, "move_teacher"):
        raise ConfigError(
            f"learner.teacher.path is {POLICY}, and learner.backend {config.learner.backend} lacks move_teacher, which "
            f"is described under `{MovesTeacher.__name__}` in asyncrl/learner/backends/protocol.py: add it, or use "
            "learner.backend torch, fsdp2 or megatron."
        )


BACKENDS: dict[str, Callable[[Config], Backend]] = {"torch": TorchBackend, "fsdp2": fsdp2, "megatron": megatron}


def builder_of(config: Config) -> Callable[[Config], Backend]:
    """Raises ConfigError for an unknown name."""
    try:
        build: Callable[[Config], Backend] = resolve(config.learner.backend, BACKENDS, "learner.backend")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return build


def objective_of(config: Config) -> Objective:
    """The objective, whose functions have been tried on made-up data. Raises ConfigError."""
    refuse_uncorrected(config)
    return Objective(config.learner)


def refuse_uncorrected(config: Config) -> None:
    """Checks the user's own loss, which the config could not import, as the config checked the named ones. Raises
    ConfigError."""
    try:
        loss = resolve(config.learner.loss, LOSSES, "learner.loss")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if properties_of(loss).correction != "itself" and (problem := uncorrected(config)):
        raise ConfigError(problem)
