from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weights.network.mirror_stage import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for each in reversed(made.closing):
        each.close()
