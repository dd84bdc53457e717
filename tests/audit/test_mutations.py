"""Whatever is changed in one row of a ledger, or in a file beside it, is noticed, or stands in a list with the reason.

The changes are generated from the tables, so that a column which is added without a witness turns this red.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from asyncrl.audit.checks import violations
from asyncrl.audit.command import audit
from asyncrl.audit.ledger import read_ledger
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.witnesses import Evidence, gather
from asyncrl.errors import RunError
from asyncrl.learner.checkpoints.checkpoints import complete
from asyncrl.run_folder import RunFolder
from tests.audit.mutations import apply, columns, mutations
from tests.audit.simulated import KINDS
from tests.audit.test_audit import acks, changed

pytestmark = pytest.mark.system

DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "audit.md"


@cache
def listed() -> dict[str, str]:
    """What is not noticed, with the reason: the table in docs/explanation/audit.md."""
    section = DOCS.read_text().partition("## What is not noticed")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return {what: why for names, why in rows for what in re.findall(r"`([^`]+)`", names)}


def unnoticed(folder: Path, evidence: Evidence, work: Path) -> tuple[Counter[str], dict[str, list[str]]]:
    """How many changes were made, by column or row, and those that no check notices."""
    made: Counter[str] = Counter()
    missed: defaultdict[str, list[str]] = defaultdict(list)
    for mutation in mutations(folder / "ledger.sqlite"):
        if not apply(mutation, folder / "ledger.sqlite", work):
            continue
        what, _, how = mutation.what.partition(": ")
        name = what if "." in what else mutation.what
        made[name] += 1
        try:
            seen = list(violations(replace(evidence, ledger=read_ledger(work)))) != []  # every check can bear it
        except RunError:
            seen = True  # it cannot be read at all, which the command says
        if not seen:
            missed[name].append(f"{how}: {mutation.where}")
    return made, missed


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Counter[str], dict[str, list[str]]]]:
    found = {}
    for kind, make in KINDS.items():
        folder = tmp_path_factory.mktemp("history")
        evidence = make(folder).evidence()
        assert list(violations(evidence)) == [], kind
        found[kind] = unnoticed(folder, evidence, tmp_path_factory.mktemp("changed"))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_row_is_noticed_or_listed(
    simulated: dict[str, tuple[Counter[str], dict[str, list[str]]]], kind: str
) -> None:
    made, missed = simulated[kind]
    assert sum(made.values()) > 300
    assert {what: rows for what, rows in missed.items() if what not in listed()} == {}


def test_a_changed_row_of_a_real_run_is_noticed_or_listed(original: RunFolder, tmp_path: Path) -> None:
    config = original.load_config()
    with closing(PayloadFiles(original.buffer / "payloads")) as payloads:
        evidence = gather(original, config, payloads)
        assert evidence.published
        assert list(violations(evidence)) == []
        made, missed = unnoticed(settled(original, tmp_path / "settled"), evidence, tmp_path / "changed")
    assert sum(made.values()) > 300
    assert {what: rows for what, rows in missed.items() if what not in listed()} == {}


def settled(run: RunFolder, folder: Path) -> Path:
    """A copy of the ledger without its log."""
    folder.mkdir()
    source = sqlite3.connect(f"{(run.buffer / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)
    with closing(source), closing(sqlite3.connect(folder / "ledger.sqlite")) as copy:
        source.backup(copy)
    return folder


def test_every_column_is_changed_and_nothing_is_listed_in_vain(
    simulated: dict[str, tuple[Counter[str], dict[str, list[str]]]],
) -> None:
    made = {what for counts, _ in simulated.values() for what in counts}
    missed = {what for _, rows in simulated.values() for what in rows}
    assert {str(column) for column in columns()} - made == set(), "a column that no history fills"
    assert listed().keys() - FILES.keys() - missed == set()
    assert sum(sum(counts.values()) for counts, _ in simulated.values()) > 1500


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


FILES: dict[str, Callable[[RunFolder], object]] = {
    "acks: a line less": lambda run: acks(run, lambda lines: lines[:2] + lines[3:]),
    "acks: two lines swapped": lambda run: acks(run, lambda lines: [lines[1], lines[0], *lines[2:]]),
    "acks: another digest": lambda run: acks(run, lambda lines: [changed(lines[0], digest="x"), *lines[1:]]),
    "acks: the last line less": lambda run: acks(run, lambda lines: lines[:-1]),
    "acks: a line less, renumbered": lambda run: acks(
        run, lambda lines: [changed(line, n=n) for n, line in enumerate(lines[:2] + lines[3:])]
    ),
    "acks: a log less": lambda run: (run.acks / "actor-0.jsonl").unlink(),
    "payloads: a byte": lambda run: flip(run.buffer / "payloads" / "00000000.segment"),
    "payloads: a segment less": lambda run: (run.buffer / "payloads" / "00000000.segment").unlink(),
    "checkpoints: the learner's list": lambda run: flip(complete(run.checkpoints)[0] / "batches.jsonl"),
    "checkpoints: the state": lambda run: flip(complete(run.checkpoints)[0] / "state.json"),
    "checkpoints: weights": lambda run: flip(next(complete(run.checkpoints)[0].rglob("*.safetensors"))),
    "checkpoints: a file less": lambda run: (complete(run.checkpoints)[-1] / "rng.pt").unlink(),
    "the newest checkpoint of all": lambda run: shutil.rmtree(complete(run.checkpoints)[-1]),
}


@pytest.mark.parametrize("what", FILES)
def test_a_changed_file_is_noticed_or_listed(run: RunFolder, what: str) -> None:
    FILES[what](run)
    try:
        noticed = audit(run) == 1
    except RunError:
        noticed = True
    assert noticed != (what in listed()), "noticed and listed, or neither"


PROMISED = r"state|reason|uses|version|place|outcome|weight|reward|digest"


def test_what_is_promised_is_listed_only_as_not_yet_done() -> None:
    found = {what for what, why in listed().items() if re.search(PROMISED, what) and not why.startswith("NOT YET")}
    assert found == set()


def test_a_group_that_another_state_drew_is_out_of_order(tmp_path: Path) -> None:
    """Its column is listed, since not every other state is; this one is."""
    evidence = KINDS["wait"](tmp_path).evidence()
    groups = dict(evidence.ledger.groups)
    groups[0] = replace(groups[0], curriculum=max(evidence.ledger.curriculum))
    said = [str(v) for v in violations(replace(evidence, ledger=replace(evidence.ledger, groups=groups)))]
    assert any("of the curriculum, out of order" in text for text in said)
