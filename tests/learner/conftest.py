from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.learner.kept_ranks import end_all


@pytest.fixture(scope="package", autouse=True)
def no_rank_outlives_its_tests() -> Iterator[None]:
    yield
    end_all()
