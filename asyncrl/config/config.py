"""The configuration of a run: the tree with the rules that span its sections."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, model_validator

from asyncrl.config.rules import impossible
from asyncrl.config.tree import Tree


class Config(Tree):
    """asyncrl: asynchronous reinforcement learning for language-model agents."""

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
        """The configuration of a YAML file (None: the defaults), with `overrides` by field path on top.

        For example `Config.load("x.yaml", {"buffer.max_staleness": 2})`; `Config.load("quickstart")` loads one that
        comes with asyncrl. Raises ConfigError.
        """
        from asyncrl.config.loading import load

        return load(cls, None if path is None else Path(path), overrides or {}).config

    @model_validator(mode="before")
    @classmethod
    def _what_launch_sets(cls, values: Any) -> Any:
        """`launch.seed` stands for the three seeds, and `launch.tuning: auto` for two fields that are auto, unless one
        of them is given as well."""
        launch = values.get("launch") if isinstance(values, dict) else None
        given = launch if isinstance(launch, dict) else vars(launch) if isinstance(launch, BaseModel) else {}
        seed, tuned = given.get("seed"), given.get("tuning") == "auto"
        set_by_it = [(name, "seed", seed) for name in ("data", "actors", "learner") if seed is not None]
        set_by_it += [("buffer", "max_staleness", "auto"), ("actors", "slots", "auto")] if tuned else []
        values = dict(values) if set_by_it else values
        for name, field, value in set_by_it:
            section = values.get(name, {})
            if isinstance(section, BaseModel):
                section = section.model_dump(exclude_unset=True)
            values[name] = {field: value} | dict(section)
        return values

    @model_validator(mode="after")
    def _fields_that_depend_on_each_other(self) -> Config:
        for problem in impossible(self):
            raise ValueError(problem)
        return self
