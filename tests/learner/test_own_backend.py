"""A learner with a backend of the user's own that lacks something of the protocol."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner import __main__ as learner
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.build import refuse_incomplete
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.reporter import Reporter
from tests.learner.tiny import tiny_config, tiny_model


class Older:
    """A backend as it was before `visit` and `add_up`; all else is plain torch's."""

    def __init__(self, config: Config) -> None:
        self._torch = TorchBackend(config, tiny_model())

    def __getattr__(self, name: str) -> Any:
        if name in ("visit", "add_up"):
            raise AttributeError(name)
        return getattr(self._torch, name)


def test_a_learner_does_not_start_and_says_which_methods_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path / "run", tiny_config(backend=f"{__name__}:Older"))
    monkeypatch.setattr(sys, "argv", ["learner", str(run.path)])

    def went_on(config: Config) -> None:
        raise AssertionError("the learner went on")

    reporter = Reporter(run.address("launcher"), "learner")
    monkeypatch.setattr(learner, "Reporter", lambda *_: reporter)
    monkeypatch.setattr(learner, "compute_alike", lambda _: None)  # it changes the whole process
    monkeypatch.setattr(learner, "channel", went_on)
    words = r"learner\.backend .*:Older lacks visit, add_up: .*`Backend` in asyncrl/learner/backends/protocol\.py"
    with closing(reporter), pytest.raises(ConfigError, match=words):
        learner.main()


def test_a_complete_backend_is_taken() -> None:
    config = tiny_config()
    refuse_incomplete(config, TorchBackend(config, tiny_model()))
    with pytest.raises(ConfigError, match="lacks dp_size, logprobs, "):
        refuse_incomplete(config, object())  # type: ignore[arg-type]
