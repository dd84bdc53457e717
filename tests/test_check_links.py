"""The link check finds what is broken on purpose, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import script

check_links = script("check_links.py")

GOOD = """# Weights

See [the next page](docs/other.md), [a part of it](docs/other.md#two-words-and-code), [this page](#weights),
[elsewhere](https://example.org/no/such), `asyncrl/thing.py`, `asyncrl/thing.py:Name`, `configs/*.yaml`,
`buffer/batches`, `asyncrl.thing.Name`, `asyncrl.Turn`.
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("docs", "asyncrl", "configs"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").write_text(GOOD)
    (tmp_path / "docs" / "other.md").write_text(
        "# Other\n\n## Two words, and `code`\n\n```\n# no heading\n```\n[up](../README.md)\n"
    )
    (tmp_path / "asyncrl" / "__init__.py").write_text("__all__ = ['Turn']\n")
    (tmp_path / "asyncrl" / "thing.py").write_text("Name = 1\n")
    (tmp_path / "configs" / "a.yaml").write_text("")
    return tmp_path


def test_what_exists_is_not_reported(root: Path) -> None:
    assert list(check_links.faults(root)) == []


@pytest.mark.parametrize(
    "broken",
    [
        "[gone](docs/gone.md)",
        "[no such heading](docs/other.md#three)",
        "[a comment in a code block is no heading](docs/other.md#no-heading)",
        "[no such heading](#three)",
        "`asyncrl/gone.py`",
        "`asyncrl launch --config configs/gone.yaml`",
        "`configs/*.json`",
        "`asyncrl.gone.Name`",
        "`asyncrl.Gone`",
    ],
)
def test_what_is_missing_is_reported_with_its_line(root: Path, broken: str) -> None:
    (root / "README.md").write_text(f"{GOOD}{broken}\n")
    (fault,) = check_links.faults(root)
    assert fault.startswith(f"README.md:{GOOD.count(chr(10)) + 1}: ")
