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
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

from asyncrl.audit.chain import read_chain
from asyncrl.audit.checks import violations
from asyncrl.audit.checks.chain import chain
from asyncrl.audit.command import audit
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import UNREADABLE, read_ledger, rows_in
from asyncrl.audit.witnesses import Evidence, gather
from asyncrl.buffer.ledger.storage.payloads import checksum
from asyncrl.buffer.record import from_record
from asyncrl.errors import RunError
from asyncrl.learner.checkpoints.checkpoints import complete
from asyncrl.run_folder import RunFolder
from tests.audit.histories import KINDS
from tests.audit.killed_run import make_killed_run
from tests.audit.mutations import CHAIN, Mutation, applied, columns, copied, mend, mend_in, mutations
from tests.audit.test_audit import acks, changed, sql

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "audit.md"


ALONE, MENDED = "## What is not noticed", "### With the chain written anew"


@cache
def listed(heading: str = ALONE) -> dict[str, str]:
    """What is not noticed, with the reason: the tables in docs/explanation/audit.md."""
    section = DOCS.read_text().partition(f"\n{heading}\n")[2].partition("\n##")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return {what: why for names, why in rows for what in re.findall(r"`([^`]+)`", names)}


@dataclass
class Outcome:
    made: Counter[str] = field(default_factory=Counter)
    """How many changes, by column or row."""
    missed: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Those that no check notices."""


def unnoticed(path: Path, evidence: Evidence) -> dict[str, Outcome]:
    """Of every change of the ledger alone, and with the chain of commits written anew behind it, so that it bears the
    change."""
    found = {ALONE: Outcome(), MENDED: Outcome()}
    with closing(copied(path)) as ledger, pytest.MonkeyPatch.context() as patch:
        # What the bytes of a payload say is the same under every change of the ledger.
        patch.setattr("asyncrl.audit.payloads.from_record", cache(from_record))
        for mutation in mutations(ledger):
            with applied(mutation, ledger) as allowed:
                for heading, seen in said_of(ledger, evidence, mutation).items() if allowed else ():
                    what, _, how = mutation.what.partition(": ")
                    name = what if "." in what else mutation.what
                    found[heading].made[name] += 1
                    if not seen:
                        found[heading].missed[name].append(f"{how}: {mutation.where}")
    return found


def said_of(ledger: sqlite3.Connection, evidence: Evidence, mutation: Mutation) -> dict[str, bool]:
    """Whether the changed ledger is noticed, as it is and with the chain written anew.

    All checks but those of the chain are given no chain, so that what they say holds for both; where they say
    something the chain need not be written anew.
    """
    of_chain = mutation.what.partition(": ")[0].partition(".")[0] == CHAIN
    try:
        rows = rows_in(ledger)
    except UNREADABLE:  # which the command says
        return {ALONE: True} if of_chain else {ALONE: True, MENDED: True}
    without = replace(evidence, ledger=replace(rows, chain=None), snapshots=())
    # All that there is: every check can bear the change.
    in_rows = [*violations(without)] != []
    in_chain = [*chain(rows, evidence.snapshots)] != []
    if of_chain:
        return {ALONE: in_rows or in_chain}
    if in_rows:
        return {ALONE: True, MENDED: True}
    mend_in(ledger)
    # A copy in a checkpoint has the chain as it was.
    mended = [*chain(replace(rows, chain=read_chain(ledger)), ())] != []
    return {ALONE: in_rows or in_chain, MENDED: in_rows or mended}


def check(found: dict[str, Outcome]) -> None:
    for heading, outcome in found.items():
        print(f"{sum(outcome.made.values())} changes: {heading}")
        assert {what: rows for what, rows in outcome.missed.items() if what not in listed(heading)} == {}, heading
        assert sum(outcome.made.values()) > 200


_FOUND: dict[str, dict[str, Outcome]] = {}


@pytest.fixture(params=KINDS)
def simulated(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Outcome]:
    kind: str = request.param
    if kind not in _FOUND:
        evidence = KINDS[kind](tmp_path / "history").evidence()
        assert list(violations(evidence)) == [], kind
        _FOUND[kind] = unnoticed(tmp_path / "history" / "ledger.sqlite", evidence)
    return _FOUND[kind]


def test_a_changed_row_is_noticed_or_listed(simulated: dict[str, Outcome]) -> None:
    check(simulated)


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_killed_run(tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize("kind", ["original", "killed"])
def test_a_changed_row_of_a_real_run_is_noticed_or_listed(kind: str, request: pytest.FixtureRequest) -> None:
    run: RunFolder = request.getfixturevalue(kind)
    with closing(PayloadFiles(run.buffer / "payloads")) as payloads:
        evidence = gather(run, run.load_config(), payloads)
        assert evidence.published
        assert list(violations(evidence)) == []
        check(unnoticed(run.buffer / "ledger.sqlite", evidence))


def test_every_column_is_changed_and_nothing_is_listed_in_vain(tmp_path: Path) -> None:
    for kind, make in KINDS.items():
        if kind not in _FOUND:  # the tests before this one were not selected
            _FOUND[kind] = unnoticed(tmp_path / kind / "ledger.sqlite", make(tmp_path / kind).evidence())
    made = {what for found in _FOUND.values() for what in found[ALONE].made}
    assert {str(column) for column in columns()} - made == set(), "a column that no history fills"
    for heading in (ALONE, MENDED):
        missed = {what for found in _FOUND.values() for what in found[heading].missed}
        assert listed(heading).keys() - FILES.keys() - missed == set()
        assert sum(sum(found[heading].made.values()) for found in _FOUND.values()) > 1500


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def flip_with_its_checksum(run: RunFolder) -> None:
    """A byte in the middle of a payload, where its tokens are, and the ledger's checksum of it."""
    folder = PayloadFiles(run.buffer / "payloads")
    row = read_ledger(run.buffer).trajectories[0, 0]
    path = folder.folder / f"{row.segment:08d}.segment"
    content = bytearray(path.read_bytes())
    content[row.start + row.bytes // 2] ^= 1
    path.write_bytes(content)
    mended = checksum(folder.read(row))
    folder.close()
    sql(run, "UPDATE trajectories SET checksum = ? WHERE grp = 0 AND idx = 0", mended)
    mend(run.buffer)


def an_earlier_ledger(run: RunFolder) -> None:
    for path in run.buffer.glob("ledger.sqlite-*"):
        path.unlink()
    shutil.copy(complete(run.checkpoints)[0] / "buffer" / "ledger.sqlite", run.buffer)


def renumbered(lines: list[str]) -> list[str]:
    return [changed(line, n=n) for n, line in enumerate(lines)]


FILES: dict[str, Callable[[RunFolder], object]] = {
    "acks: a line less": lambda run: acks(run, lambda lines: lines[:2] + lines[3:]),
    "acks: two lines swapped": lambda run: acks(run, lambda lines: [lines[1], lines[0], *lines[2:]]),
    "acks: another digest": lambda run: acks(run, lambda lines: [lines[0], changed(lines[1], digest="x"), *lines[2:]]),
    "acks: the last line less": lambda run: acks(run, lambda lines: lines[:-1]),
    "acks: the last two lines less": lambda run: acks(run, lambda lines: lines[:-2]),
    "acks: half of the lines": lambda run: acks(run, lambda lines: lines[: len(lines) // 2]),
    "acks: no line": lambda run: acks(run, lambda lines: []),
    "acks: a line less, renumbered": lambda run: acks(run, lambda lines: renumbered(lines[:2] + lines[3:])),
    "acks: an acknowledgement less, renumbered": lambda run: acks(run, lambda lines: renumbered(lines[:1] + lines[2:])),
    "acks: two lines swapped, renumbered": lambda run: acks(
        run, lambda lines: renumbered([lines[1], lines[0], *lines[2:]])
    ),
    "acks: a log less": lambda run: (run.acks / "actor-0.jsonl").unlink(),
    "acks: a log under another name": lambda run: (run.acks / "actor-0.jsonl").rename(run.acks / "actor-1.jsonl"),
    "payloads: a byte": lambda run: flip(run.buffer / "payloads" / "00000000.segment"),
    "payloads: a byte, its checksum and the chain": flip_with_its_checksum,
    "payloads: a segment less": lambda run: (run.buffer / "payloads" / "00000000.segment").unlink(),
    "checkpoints: the learner's list": lambda run: flip(complete(run.checkpoints)[0] / "batches.jsonl"),
    "checkpoints: the state": lambda run: flip(complete(run.checkpoints)[0] / "state.json"),
    "checkpoints: weights": lambda run: flip(next(complete(run.checkpoints)[0].rglob("*.safetensors"))),
    "checkpoints: weights of the newest": lambda run: flip(next(complete(run.checkpoints)[-1].rglob("*.safetensors"))),
    "checkpoints: a file less": lambda run: (complete(run.checkpoints)[-1] / "rng.pt").unlink(),
    "checkpoints: another ledger": lambda run: shutil.copy(
        complete(run.checkpoints)[0] / "buffer" / "ledger.sqlite", complete(run.checkpoints)[-1] / "buffer"
    ),
    "ledger: that of a checkpoint": an_earlier_ledger,
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


@pytest.mark.parametrize("heading", [ALONE, MENDED])
def test_nothing_that_is_promised_is_listed(heading: str) -> None:
    assert {what for what in listed(heading) if re.search(PROMISED, what)} == set()


def test_a_group_that_another_state_drew_is_out_of_order(tmp_path: Path) -> None:
    """Its column is listed, since not every other state is; this one is."""
    evidence = KINDS["wait"](tmp_path).evidence()
    groups = dict(evidence.ledger.groups)
    groups[0] = replace(groups[0], curriculum=max(evidence.ledger.curriculum))
    said = [str(v) for v in violations(replace(evidence, ledger=replace(evidence.ledger, groups=groups)))]
    assert any("of the curriculum, out of order" in text for text in said)
