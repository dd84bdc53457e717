"""Ranges in pyproject.toml for those who install asyncrl, one exact set for its tests."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]


def exact_versions() -> dict[str, str]:
    lines = (ROOT / "requirements" / "tested.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_what_a_user_installs_is_a_range() -> None:
    exact = [text for text in PROJECT["dependencies"] if "==" in text]
    assert exact == []


def test_the_tested_versions_lie_in_the_ranges() -> None:
    versions = exact_versions()
    extras = (name for name in OPTIONAL if name != "bench")  # what it compares with is not part of the tests
    texts = [*PROJECT["dependencies"], *(text for name in extras for text in OPTIONAL[name])]
    needed = [need for need in map(Requirement, texts) if need.name != "asyncrl"]
    missing = [need.name for need in needed if canonicalize_name(need.name) not in versions]
    assert missing == []
    outside = [str(need) for need in needed if versions[canonicalize_name(need.name)] not in need.specifier]
    assert outside == []


def test_make_installs_the_tested_torch_first_and_alone_then_the_tested_set() -> None:
    command = ["make", "--dry-run", "--always-make", ".venv/.tested"]
    lines = subprocess.check_output(command, cwd=ROOT, text=True, timeout=60).splitlines()
    installs = [line for line in lines if "pip install" in line]
    assert installs[0].endswith(f"install --quiet torch=={exact_versions()['torch']}")
    assert all("-c requirements/tested.txt" in line for line in installs[1:])
    assert len(installs) == 2


def test_vllms_environment_has_the_tested_torch_and_transformers() -> None:
    pinned = (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    for name in ("torch", "transformers"):
        assert any(line.partition("+")[0] == f"{name}=={exact_versions()[name]}" for line in pinned), name
