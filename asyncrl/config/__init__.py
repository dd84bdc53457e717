"""The configuration of a run: one pydantic tree; YAML in, flags on top."""

from asyncrl.config.config import Config
from asyncrl.config.sections import ActorsConfig, ModelConfig

__all__ = ["ActorsConfig", "Config", "ModelConfig"]
