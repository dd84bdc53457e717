"""The count of the files on the way of a trajectory leaves out what it names, and names what exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import script

ROOT = Path(__file__).parents[1]
count = script("way/count.py")


@pytest.mark.parametrize("prefix", [prefix for _, new in count.NEEDED.values() for prefix in new])
def test_every_prefix_of_this_tree_exists(prefix: str) -> None:
    assert (ROOT / "asyncrl" / prefix).exists()


def test_what_is_needed_and_not_entered_is_left_out_in_both_trees() -> None:
    old = ["actors/episode.py", "actors/leases.py", "actors/engines/hf.py", "buffer/database.py", "buffer/rows.py"]
    new = ["actors/episodes/episode.py", "rendering/build.py", "buffer/ledger/records.py", "learner/loop.py"]
    assert count.must_enter(old) == ["actors/episode.py", "buffer/rows.py"]
    assert count.must_enter(new) == ["actors/episodes/episode.py", "buffer/ledger/records.py", "learner/loop.py"]
