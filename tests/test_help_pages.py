"""The pages for a user in trouble, or from another system, name fields, series and events that exist."""

from __future__ import annotations

import re
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.loading import fields
from asyncrl.tracking.series import SECTIONS, find
from asyncrl.tracking.terminal.live import SHOWN_EVENTS

DOCS = Path(__file__).parents[1] / "docs"
NO_SIGNAL = DOCS / "how-to" / "reward-does-not-move.md"
OTHERS = DOCS / "reference" / "other-systems.md"
FIELDS = {path for path, _ in fields(Config)}


def named(text: str) -> set[str]:
    """Words in backquotes, without values."""
    return {word.partition(":")[0].strip() for word in re.findall(r"`([^`\n]+)`", text)}


def is_field(name: str) -> bool:
    return name in FIELDS or any(name.startswith(f"{path}.") and path.endswith("options") for path in FIELDS)


def test_every_field_of_the_table_exists() -> None:
    rows = [line.split("|") for line in OTHERS.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    for row in rows:
        assert len(row) == 8, f"{row[1]}: five systems"
        ours = [name for name in named(row[1]) if "." in name]
        assert ours
        assert all(is_field(name) for name in ours), ours


def test_the_page_about_rewards_names_what_exists() -> None:
    text = NO_SIGNAL.read_text()
    sections = tuple(f"{name}." for name in Config.model_fields)
    for name in named(text):
        if name.startswith(sections) and "/" not in name and not name.endswith((".jsonl", ".html", ".md")):
            assert is_field(name), name
        if name.partition("/")[0] in SECTIONS and "/" in name:
            assert find(name.replace("*", "x" if "by_name" in name else "done")) is not None or "held_out" in name, name
    assert {"failing", "eval_failed", "guard"} <= SHOWN_EVENTS


def test_a_sentence_that_names_the_page_names_one_that_is_there() -> None:
    source = (Path(__file__).parents[1] / "asyncrl" / "learner" / "reporting" / "no_signal.py").read_text()
    (name,) = set(re.findall(r"docs/[\w./-]+\.md", source))
    assert (DOCS.parent / name).is_file()
