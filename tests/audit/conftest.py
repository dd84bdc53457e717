from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from asyncrl.run_folder import RunFolder
from tests.audit.real_run import make_run


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Not to be changed."""
    return make_run(tmp_path_factory.mktemp("audited"))


@pytest.fixture
def run(original: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy to tamper with."""
    shutil.copytree(original.path, tmp_path / "run")
    return RunFolder.existing(tmp_path / "run")
