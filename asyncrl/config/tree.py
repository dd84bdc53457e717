"""The configuration tree: its eleven sections, before the rules that span them are checked (`config.py`)."""

from __future__ import annotations

from asyncrl.config.launch import LaunchConfig, RayConfig, TrackingConfig
from asyncrl.config.learner import LearnerConfig
from asyncrl.config.sections import (
    ActorsConfig,
    BufferConfig,
    DataConfig,
    EnvConfig,
    EvalConfig,
    ModelConfig,
    Section,
    WeightsConfig,
)


class Tree(Section):
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    actors: ActorsConfig = ActorsConfig()
    buffer: BufferConfig = BufferConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    launch: LaunchConfig = LaunchConfig()
    ray: RayConfig = RayConfig()
