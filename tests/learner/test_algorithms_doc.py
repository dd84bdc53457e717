"""docs/reference/algorithms.md lists every name and every option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.advantages import ESTIMATORS
from asyncrl.learner.corrections import CORRECTIONS
from asyncrl.learner.losses import AGGREGATIONS, LOSSES
from asyncrl.learner.objective.kl import CONTROLLERS, KL
from asyncrl.learner.objective.shaping import SHAPING

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md").read_text()
SECTIONS = {
    "Advantages": ESTIMATORS,
    "Objectives": LOSSES,
    "Corrections": CORRECTIONS,
    "Aggregation": AGGREGATIONS,
    "Rewards,": SHAPING,
}


def options(fn: Callable[..., Any]) -> list[str]:
    """Keyword-only parameters: what a config may set."""
    return [n for n, p in inspect.signature(fn).parameters.items() if p.kind is p.KEYWORD_ONLY]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_name_and_option(section: str) -> None:
    text = TEXT.split(f"\n## {section} ")[1].split("\n## ")[0]
    rows = {line.split("|")[1].strip(" *`"): line for line in text.splitlines() if line.startswith("|")}
    for name, fn in SECTIONS[section].items():
        assert name in rows, f"{section}: {name} has no row in docs/reference/algorithms.md"
        for option in options(fn):
            shared = option in text and "those of `ppo`" in rows[name]
            assert f"`{option}`" in rows[name] or shared, f"{section}: {name}.{option} is not in its row"


def test_every_kl() -> None:
    text = TEXT.split("\n## KL ")[1].split("\n## ")[0]
    assert all(f"`{name}`" in text for name in KL)


def test_every_field_that_chooses_what_is_trained_on() -> None:
    fields = list(LearnerConfig.model_fields)
    of_the_objective = fields[fields.index("advantage") : fields.index("min_ess") + 1]
    assert len(of_the_objective) > 20
    missing = [f for f in of_the_objective if not any(said in TEXT for said in (f"learner.{f}", f"`{f}`", f"  {f}:"))]
    assert missing == []
    assert all(f"`{name}`" in TEXT for name in CONTROLLERS)
