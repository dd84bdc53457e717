from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder


@pytest.fixture
def config() -> Config:
    return Config.model_validate(
        {"launch": {"restarts": 2, "stop_s": 5.0, "start_s": 30.0}, "actors": {"drain_s": 0.0}, "eval": {"tasks": 0}}
    )


@pytest.fixture
def run(tmp_path: Path, config: Config) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path / "run", config)
    yield folder
    kill_all(of_run(folder.id))
    folder.remove_temporary()
