from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.data.sources.generated import GeneratedSource
from asyncrl.errors import ConfigError

CODE = """
def make(rng, most=10**6):
    a, b = rng.randrange(most), rng.randrange(most)
    return {"prompt": f"{a} + {b} = ?", "ground_truth": a + b}

def few(rng):
    return {"prompt": rng.choice("ab")}

def wrong(rng):
    return {"question": 1}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "tasks.py").write_text(CODE)
    return str(tmp_path / "tasks.py")


def test_tasks_follow_from_seed_side_and_index(file: str) -> None:
    source = GeneratedSource(f"{file}:make", seed=1, held_out_size=3)
    tasks = [source.task(i) for i in range(50)]
    assert GeneratedSource(f"{file}:make", seed=1, held_out_size=3).task(41) == tasks[41]
    assert len({task["id"] for task in tasks}) == len({task["prompt"] for task in tasks}) == 50
    assert GeneratedSource(f"{file}:make", seed=2).task(0) != tasks[0]
    assert source.train_size is None
    with pytest.raises(IndexError):
        source.held_out(3)


def test_no_held_out_prompt_is_trained_on(file: str) -> None:
    source = GeneratedSource(f"{file}:make", options={"most": 2}, held_out_size=2)
    held = {source.held_out(i)["prompt"] for i in range(2)}
    assert not held & {source.task(i)["prompt"] for i in range(100)}
    with pytest.raises(ConfigError, match="tasks in a row had prompts that are held out"):
        GeneratedSource(f"{file}:few", held_out_size=20).task(0)


def test_what_is_no_task_is_refused(file: str) -> None:
    with pytest.raises(ConfigError, match="expected a mapping with `prompt`"):
        GeneratedSource(f"{file}:wrong")
    with pytest.raises(ConfigError, match=r"data\.options\.function: .*has no 'mak' \(did you mean 'make'\?\)"):
        GeneratedSource(f"{file}:mak")
