from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import Config, open_run
from asyncrl.errors import RunError
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.rollouts import store
from asyncrl.tracking.rollouts.sample import FORMAT, Rollout, RolloutRow
from asyncrl.tracking.rollouts.store import Store, surplus
from asyncrl.tracking.rollouts.tables import COLUMNS, TEXT_CHARS, NewTables


def a_rollout(batch: int = 0, *, branch: int = 0, text: str = "hi!", **given: Any) -> Rollout:
    row = RolloutRow(
        text=text, ends=[1, len(text)], token_ids=[4, 5], sampled=[False, True], versions=[-1, 3],
        logprobs=[0.0, -0.5], learner_logprobs=[0.0, float("nan")], weights=[0.0, 1.0], advantages=[0.0, -1.0],
        loss_mask=[False, True],
    )  # fmt: skip
    values: dict[str, Any] = {
        "format": FORMAT, "branch": branch, "batch": batch, "version": batch, "outcome": "applied", "group": 1,
        "index": 0, "attempt": 0, "actor": "actor-0", "task_id": "t", "env": "e", "reward": 0.5,
        "rewards": {"success": 0.5}, "turns": 1, "stop_reason": "done", "group_weight": 1.0, "digest": "d",
        "rows": [row],
    }  # fmt: skip
    return Rollout(**(values | given))


def a_run(path: Path) -> RunFolder:
    return RunFolder.create(path / "r", Config())


def test_a_user_reads_them_from_the_run(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert list(open_run(run.path).rollouts()) == []
    written = Store(run.rollouts, 1.0)
    for batch in (10, 9, 100):
        written.write([a_rollout(batch, text="ÿ\u2028\u202e<script>")])
    read = list(open_run(run.path).rollouts())
    assert [(r.batch, r.step) for r in read] == [(9, 10), (10, 11), (100, 101)]
    assert read[0].rows[0].pieces() == ["ÿ", "\u2028\u202e<script>"]
    assert read[0].rows[0].learner_logprobs == [0.0, None], "not finite"
    line = json.loads((run.rollouts / "0000-00000009.jsonl").read_text())
    assert line["rows"][0]["text"] == "ÿ\u2028\u202e<script>", "plain JSON lines"


@given(st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 30)), st.integers(0, 9)), st.integers(0, 60),
       st.integers(1, 8))  # fmt: skip
def test_what_stays_fits_and_has_the_newest(sizes: dict[tuple[int, int], int], most: int, files: int) -> None:
    removed = surplus(sizes, most, files)
    kept = set(sizes) - set(removed)
    assert len(removed) == len(set(removed)) == len(sizes) - len(kept)
    if sizes:
        assert max(sizes, key=lambda key: (key[1], key[0])) in kept
    assert len(kept) <= 1 or (len(kept) <= files and sum(sizes[key] for key in kept) <= most)


def test_the_whole_stays_under_its_bound_and_spread_over_the_run(tmp_path: Path) -> None:
    one = len(store.encode(a_rollout()))
    bound = one * 40 / 1e6
    for half in (range(100), range(100, 200)):  # another launch of the run goes on with what lies there
        written = Store(tmp_path, bound)
        for batch in half:
            written.write([a_rollout(batch)])
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= one * 42
    batches = [batch for _, batch in store.files(tmp_path)]
    assert batches[-1] == 199
    assert batches[0] < 10, "the beginning of the run is still there"
    gaps = [b - a for a, b in itertools.pairwise(batches)]
    assert max(gaps) <= 12, "200 batches in 40 files"


def test_one_large_batch_leaves_out_trajectories(tmp_path: Path) -> None:
    Store(tmp_path, 0.01).write([a_rollout(text="x" * 400, index=i) for i in range(50)])
    (path,) = tmp_path.iterdir()
    assert 0 < path.stat().st_size <= 0.01e6 / 8 + 1000
    assert [r.index for r in store.read(path)] == list(range(len(store.read(path))))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"format": 2, "rows": "otherwise"}', "it has format 2, this asyncrl reads 1"),
        (b'{"format": 1, "branch"', "the file is damaged; remove it"),
        (b"[" * 100_000, "the file is damaged; remove it"),
    ],
)
def test_a_damaged_or_newer_file_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    run = a_run(tmp_path)
    Store(run.rollouts, 1.0).write([a_rollout()])
    with (run.rollouts / "0000-00000000.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(RunError, match=said) as raised:
        list(open_run(run.path).rollouts())
    assert "0000-00000000.jsonl, line 2" in str(raised.value)


def test_tables_have_each_batch_once(tmp_path: Path) -> None:
    written = Store(tmp_path, 1.0)
    written.write([a_rollout(0)])
    tables = NewTables(tmp_path)
    assert list(tables.look()) == [], "of an earlier launch"
    written.write([a_rollout(1), a_rollout(1, text="y" * (TEXT_CHARS + 5))])
    ((step, rows),) = tables.look()
    assert step == 2
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert rows[0][-1] == "hi!"
    assert rows[1][-1].endswith("y [5 more characters]")
    assert list(tables.look()) == []
