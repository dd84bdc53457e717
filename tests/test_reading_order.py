"""The way of the data can be read in one sitting: architecture.md lists its files, and their code is counted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.scripts import script

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
code_lines = script("code_lines.py")

WAY, DECIDING = "at most 900 lines of code together", "at most 500 lines of code together"
"""The sentences before the two tables, without which no table is found."""
IMPURE = {"asyncio", "datetime", "os", "secrets", "select", "socket", "subprocess", "threading", "time", "uuid", "zmq"}
"""Modules with clocks, devices, sockets or randomness of their own; `random.Random` comes as an argument."""


def listed(sentence: str) -> list[str]:
    """Files in the first table below `sentence`; every row names exactly one."""
    table = re.search(r"(?:^\|.*\n)+", PAGE[PAGE.index(sentence) :], re.MULTILINE)
    assert table is not None
    return [_only(re.findall(r"`(asyncrl/[\w/]+\.py)`", row)) for row in table[0].splitlines()[2:]]


def _only(names: list[str]) -> str:
    (name,) = names
    return name


@pytest.mark.parametrize("sentence", [WAY, DECIDING])
def test_the_files_of_each_table_are_as_short_as_it_says(sentence: str) -> None:
    files, limit = listed(sentence), int(re.findall(r"\d+", sentence)[0])
    lines = {name: code_lines.code_lines(ROOT / name) for name in files}
    assert len(lines) == len(files), f"a file is listed twice: {files}"
    assert sum(lines.values()) <= limit, f"{sum(lines.values())} code lines, at most {limit}: {lines}"


def test_the_way_passes_through_every_loop_in_order() -> None:
    packages = [name.split("/")[1] for name in listed(WAY)]
    assert list(dict.fromkeys(packages)) == ["launch", "actors", "buffer", "learner"]
    assert {f"asyncrl/{package}/loop.py" for package in packages} <= {*listed(WAY)}


@pytest.mark.parametrize(
    "decision",
    [
        ("eligibility", "verdict"), ("deadlines", "due"), ("admission", "admits"), ("filters", "FILTERS"),
        ("order of batches", "choose"), ("shares", "share"), ("order of tickets", "IssueQueue"), ("tickets", "Tickets"),
        ("refusals", "Validity"), ("branches", "History"), ("transitions", "Ledger"),
        ("the step's guard", "run_update"),
    ],
    ids=lambda decision: decision[0],
)  # fmt: skip
def test_what_decides_is_in_a_listed_file_wherever_it_moves(decision: tuple[str, str]) -> None:
    _, name = decision
    homes = {
        str(file.relative_to(ROOT))
        for package in ("buffer", "learner/step")
        for file in (ROOT / "asyncrl" / package).rglob("*.py")
        if name in _defined(ast.parse(file.read_text()))
    }
    assert homes, f"nothing in asyncrl/buffer or asyncrl/learner/step is called {name} any more"
    assert homes <= {*listed(WAY), *listed(DECIDING)}


def _defined(tree: ast.Module) -> set[str]:
    """Names that a module defines at its top level."""
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    named = [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return defined | {target.id for target in named if isinstance(target, ast.Name)}


@pytest.mark.parametrize("name", listed(DECIDING))
def test_what_decides_is_pure(name: str) -> None:
    imported = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse((ROOT / name).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not {module.partition(".")[0] for module in imported} & IMPURE
