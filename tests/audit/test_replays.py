"""The audit draws again what was replayed: a buffer that decides otherwise than it says is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.checks import violations
from asyncrl.buffer import batches
from asyncrl.buffer.ledger.records import NOTHING
from asyncrl.buffer.replaying import draw
from asyncrl.buffer.tickets.places import Places
from tests.audit.simulated import replayed


def drawing(change: Callable[[Any], Any], groups: Callable[[list[Any]], list[Any]] = lambda groups: groups) -> Any:
    """The draw under other settings than those of the run, or among other groups."""
    return lambda rules, used, version, rng: draw(change(rules), groups(list(used)), version, rng)


oldest_first = Places._oldest_first
BROKEN: dict[str, tuple[Any, str, Any, str]] = {
    "another seed": (batches, "seed_of", lambda *_: "x", "the seed draws"),
    "candidates left out": (batches, "draw", drawing(lambda r: r, lambda groups: groups[1:]), "candidates; the seed"),
    "no beta": (batches, "draw", drawing(lambda r: replace(r, beta=0.0)), "the seed draws"),
    "another exponent": (batches, "draw", drawing(lambda r: replace(r, exponent=1.0)), "the seed draws"),
    "without age": (batches, "draw", drawing(lambda r: replace(r, half_life=None)), "the seed draws"),
    "fewer": (batches, "draw", drawing(lambda r: replace(r, most=1)), "the seed draws"),
    "none": (batches.Batches, "_replayed", lambda *_: NOTHING, "replays nothing of 0 candidates; the seed draws"),
    "the newest yield": (Places, "_oldest_first", lambda self: oldest_first(self)[::-1], "is recorded as yielded at"),
}


def test_what_was_drawn_as_the_settings_say_passes(tmp_path: Path) -> None:
    assert list(violations(replayed(tmp_path).evidence())) == []


@pytest.mark.parametrize("what", BROKEN)
def test_what_was_drawn_otherwise_is_named(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *changed, says = BROKEN[what]
    monkeypatch.setattr(*changed)
    said = [str(violation) for violation in violations(replayed(tmp_path).evidence())]
    assert any(text.startswith("replays: ") and says in text for text in said), said
