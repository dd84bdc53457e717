"""The import contracts of pyproject.toml: each is kept, and each notices a line that breaks it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
BREAKS = {
    "floors": ("asyncrl/data/base.py", "from asyncrl.launch import roles"),
    "processes": ("asyncrl/actors/loop.py", "from asyncrl.buffer import core"),
    "circles": ("asyncrl/actors/episodes/rows.py", "from asyncrl.actors.episodes import episode"),
    "door": ("asyncrl/buffer/client/messages.py", "from asyncrl.buffer.ledger import ledger"),
    "light": ("asyncrl/launch/roles.py", "import torch"),
    "buffer": ("asyncrl/buffer/core.py", "import ray"),
}
"""Contract -> a file, and a line that this contract forbids there."""


def lint(folder: Path, contract: str) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command as lint; lint()"
    command = [sys.executable, "-c", code, "--no-cache", "--no-logo", "--contract", contract]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_every_contract_has_a_line_that_breaks_it() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["id"] for contract in contracts} == set(BREAKS)


@pytest.mark.parametrize("contract", BREAKS)
def test_a_contract_is_kept_and_notices_a_violation(contract: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "asyncrl", tmp_path / "asyncrl", ignore=shutil.ignore_patterns("__pycache__", "checkpoint"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    kept = lint(tmp_path, contract)
    assert kept.returncode == 0, kept.stdout
    name, line = BREAKS[contract]
    with (tmp_path / name).open("a") as file:
        file.write(f"\n\ndef _broken() -> None:\n    {line}  # a lazy import counts too\n")
    broken = lint(tmp_path, contract)
    assert broken.returncode == 1
    assert "1 broken" in broken.stdout


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
