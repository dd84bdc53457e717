"""The import contracts of pyproject.toml: each is kept, and each notices a line that breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
BREAKS = {
    "floors": ("asyncrl/data/base.py", "from asyncrl.launch import roles", "asyncrl.data.base -> asyncrl.launch.roles"),
    "processes": (
        "asyncrl/actors/loop.py",
        "from asyncrl.buffer import core",
        "asyncrl.actors.loop -> asyncrl.buffer.core",
    ),
    "circles": (
        "asyncrl/actors/episodes/rows.py",
        "from asyncrl.actors.episodes import episode",
        ".rows -> .episode",
    ),
    "door": (
        "asyncrl/buffer/client/messages.py",
        "from asyncrl.buffer.ledger import ledger",
        "asyncrl.buffer.client.messages -> asyncrl.buffer.ledger.ledger",
    ),
    "light": ("asyncrl/launch/roles.py", "import torch", "asyncrl.launch.roles -> torch"),
    "buffer": ("asyncrl/buffer/core.py", "import ray", "asyncrl.buffer.core -> ray"),
}
"""Contract -> a file, a line that this contract forbids there, and how its report names it."""


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """All contracts at once: reading the imports of all files is nearly all of its time."""
    code = "from importlinter.cli import lint_imports_command as lint; lint()"
    command = [sys.executable, "-c", code, "--no-cache", "--no-logo"]
    wide = os.environ | {"COLUMNS": "300"}
    return subprocess.run(command, cwd=folder, env=wide, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "asyncrl", folder / "asyncrl", ignore=shutil.ignore_patterns("__pycache__", "checkpoint"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture(scope="module")
def kept(copy: Path) -> subprocess.CompletedProcess[str]:
    return lint(copy)


@pytest.fixture(scope="module")
def broken(copy: Path, kept: subprocess.CompletedProcess[str]) -> str:
    """The report once each file has the line that is forbidden there."""
    for name, line, _ in BREAKS.values():
        with (copy / name).open("a") as file:
            file.write(f"\n\ndef _broken() -> None:\n    {line}  # a lazy import counts too\n")
    done = lint(copy)
    assert done.returncode == 1, done.stderr
    return done.stdout.partition("Broken contracts")[2]


def test_every_contract_has_a_line_that_breaks_it() -> None:
    assert {contract["id"] for contract in CONTRACTS} == set(BREAKS)


def test_every_contract_is_kept(kept: subprocess.CompletedProcess[str]) -> None:
    assert kept.returncode == 0, kept.stdout
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken" in kept.stdout


@pytest.mark.parametrize("contract", BREAKS)
def test_a_contract_notices_a_violation(contract: str, broken: str) -> None:
    names = {c["id"]: c["name"] for c in CONTRACTS}
    report = broken.partition(names[contract])[2]
    ends = [report.find(name) for id, name in names.items() if id != contract and name in report]
    assert BREAKS[contract][2] in report[: min(ends, default=None)]


def test_no_circle_among_modules_even_through_the_faces_of_packages() -> None:
    """An independent count: circles of single files, lazy and TYPE_CHECKING imports included."""
    graph = grimp.build_graph("asyncrl", cache_dir=None)
    circles = [
        sorted((module, other))
        for module in graph.modules
        for other in graph.find_upstream_modules(module)
        if module < other and module in graph.find_upstream_modules(other)
    ]
    assert circles == []
