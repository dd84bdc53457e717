"""docs/algorithms.md lists every name and every option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.learner.advantages import ESTIMATORS
from asyncrl.learner.aggregation import AGGREGATIONS
from asyncrl.learner.corrections import CORRECTIONS
from asyncrl.learner.kl import KL
from asyncrl.learner.losses import LOSSES

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
SECTIONS = {"Advantages": ESTIMATORS, "Objectives": LOSSES, "Corrections": CORRECTIONS, "Aggregation": AGGREGATIONS}


def options(fn: Callable[..., Any]) -> list[str]:
    """Keyword-only parameters: what a config may set, and the extra inputs that the training step passes."""
    return [n for n, p in inspect.signature(fn).parameters.items() if p.kind is p.KEYWORD_ONLY]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_name_and_option(section: str) -> None:
    text = TEXT.split(f"\n## {section} ")[1].split("\n## ")[0]
    rows = {line.split("|")[1].strip(" *`"): line for line in text.splitlines() if line.startswith("|")}
    for name, fn in SECTIONS[section].items():
        assert name in rows, f"{section}: {name} has no row in docs/algorithms.md"
        for option in options(fn):
            shared = option in text and ("those of `ppo`" in rows[name] or option == "unit_tokens")
            assert f"`{option}`" in rows[name] or shared, f"{section}: {name}.{option} is not in its row"


def test_every_kl() -> None:
    text = TEXT.split("\n## KL ")[1].split("\n## ")[0]
    assert all(f"`{name}`" in text for name in KL)
