"""The configuration of a run: one pydantic tree, YAML in, flags on top."""

from asyncrl.config.sections import ActorsConfig, Config, ModelConfig

__all__ = ["ActorsConfig", "Config", "ModelConfig"]
