"""The process of verifiers, seen from the actor. With the real package: tests/test_environment_configs.py."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl.actors.envs.adapters.verifiers import play_verifiers
from asyncrl.data.sources.verifiers import VerifiersSource
from asyncrl.errors import ConfigError

FAKE = f"""#!{sys.executable}
import json, sys
if "tasks" in sys.argv:
    print(json.dumps([{{"id": str(i), "prompt": f"task {{i}}"}} for i in range(4)]))
    sys.exit()
print('{{"ready": true}}', flush=True)
for line in sys.stdin:
    wish = json.loads(line)
    if wish["index"] == 9:
        sys.exit(3)
    answer = {{"error": "no such task"}} if wish["index"] == 5 else {{"result": {{"right": wish["index"]}}}}
    print(json.dumps(answer | {{"n": wish["n"]}}), flush=True)
"""


@dataclass
class Client:
    base_url: str = "http://127.0.0.1:1/r/x/v1/"


@pytest.fixture
def fake(tmp_path: Path) -> str:
    """An interpreter that plays the worker's part, whatever it is asked to run."""
    path = tmp_path / "fake_python"
    path.write_text(FAKE)
    path.chmod(0o700)
    return str(path)


@pytest.mark.timeout(30)
def test_episodes_share_a_process_and_one_that_dies_costs_only_those_that_wait(fake: str) -> None:
    async def play(index: int) -> dict[str, float]:
        return await play_verifiers({"index": index}, Client(), taskset={"id": "sums"}, python=fake)

    async def run() -> None:
        assert await asyncio.gather(play(1), play(0)) == [{"right": 1.0}, {"right": 0.0}]
        with pytest.raises(RuntimeError, match="verifiers: no such task"):
            await play(5)
        with pytest.raises(ConnectionError, match="ended with 3"):
            await play(9)
        assert await play(2) == {"right": 2.0}, "started again"

    asyncio.run(run())


def test_a_python_that_is_not_there_is_an_error_of_the_episode_and_of_the_config(tmp_path: Path) -> None:
    missing = str(tmp_path / "python")
    with pytest.raises(ConnectionError, match="No such file"):
        asyncio.run(play_verifiers({"index": 0}, Client(), taskset={"id": "sums"}, python=missing))
    with pytest.raises(ConfigError, match=r"data\.options\.python is .*No such file .*make that Python"):
        VerifiersSource({"id": "sums"}, python=missing)
    with pytest.raises(ConfigError, match=r"data\.options\.list_s is 0\.01, and listing the tasks of .*: raise it"):
        VerifiersSource({"id": "sums"}, list_s=0.01)


@pytest.mark.timeout(30)
def test_the_last_tasks_are_held_out(fake: str) -> None:
    source = VerifiersSource({"id": "sums"}, python=fake, held_out_size=1)
    assert source.held_out(0) == {"id": "sums-3", "prompt": "task 3", "index": 3}
    assert {source.task(i)["index"] for i in range(3)} == {0, 1, 2}
    with pytest.raises(ConfigError, match=r"does not have the package: pip install verifiers in a Python of its own"):
        VerifiersSource({"id": "sums"}, python=sys.executable)


def with_site(folder: Path, files: dict[str, str]) -> str:
    """An interpreter that finds these files as installed packages, before all others."""
    for name, text in files.items():
        path = folder / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/site exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    return str(python)


NAMED = {"verifiers-0.1.5.dist-info/METADATA": "Metadata-Version: 2.1\nName: verifiers\nVersion: 0.1.5\n"}
IN_V1 = "verifiers/v1/envs/single_agent/"
OTHERS = {
    # As in verifiers 0.1.5, which has no v1.
    "old": ({"verifiers/__init__.py": "", **NAMED}, "know, 0.1.5 (No module named 'verifiers.v1'): pip install verifi"),
    "renamed": (
        {f"{IN_V1}env.py": "", **NAMED}, "does not know, 0.1.5 (cannot import name 'SingleAgentEnv' from 'verifiers.v1"
    ),
    "without metadata": ({"verifiers/__init__.py": ""}, "know, one without metadata (No module named 'verifiers.v1')"),
    "without its dependency": (
        {"verifiers/__init__.py": "import quite_another", **NAMED}, "does not load: ModuleNotFoundError: No module name"
    ),
}  # fmt: skip


@pytest.mark.timeout(30)
@pytest.mark.parametrize("other", OTHERS)
def test_another_version_is_told_in_one_sentence(other: str, tmp_path: Path) -> None:
    files, words = OTHERS[other]
    with pytest.raises(ConfigError) as told:
        VerifiersSource({"id": "sums"}, python=with_site(tmp_path, files))
    assert words in str(told.value)
    assert "\n" not in str(told.value)
