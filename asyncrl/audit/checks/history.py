"""The learner's side of the ledger (branches, starts, batches, publications, checkpoints) follows from itself."""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from asyncrl.audit.ledger import BatchRow, LedgerRows
from asyncrl.audit.table import Check, apply
from asyncrl.audit.witnesses import LearnerList, Publication
from asyncrl.buffer.tickets.carried import GIVEN_UP

Said = tuple[Sequence[LearnerList], Sequence[Publication], Sequence[str]]
"""What the learner wrote into its checkpoints, what it reported as published, and the checkpoints that it completed."""


def history(
    ledger: LedgerRows, lists: Sequence[LearnerList], published: Sequence[Publication], completed: Sequence[str] = ()
) -> Iterator[str]:
    return apply(HISTORY, ledger, (lists, published, completed))


def rows_are_numbered(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """Batches, starts, checkpoints, evaluations, stops, curriculum states, ends of used groups are numbered from 1."""
    keys = dict.fromkeys(("batches", "checkpoints", "evals", "retired", "stops"), "serial")
    keys |= {"incarnations": "incarnation"}
    numbers = {table: [row[key] for row in ledger.tables[table]] for table, key in keys.items()}
    for table, found in (numbers | {"curriculum": list(ledger.curriculum)}).items():
        if sorted(found) != list(range(1, len(found) + 1)):
            yield f"the rows of {table} are numbered {sorted(found)}, expected 1, 2, ... without gaps"


def branches_follow(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """A branch begins on the one before it, at the version that its batches had made, for a reason that names it.
    Only a restore skips numbers: those of branches that were lost with their host."""
    parent = None
    for place, branch in enumerate(ledger.branches.values()):
        version = 0 if parent is None else _before(ledger, parent, branch.fork_batch)
        number = 0 if parent is None else parent + 1
        skips = branch.restored and branch.branch > number
        if (branch.branch != number and not skips) or branch.parent != parent or branch.fork_version != version:
            yield (
                f"branch {branch.branch} begins on branch {branch.parent} at batch {branch.fork_batch}, version "
                f"{branch.fork_version}; expected branch {number} on branch {parent}, version {version}"
            )
        b = branch.fork_batch
        begun = (
            rf"a fresh start at batch {b}|batch {b} was \w+ and is now \w+|the ledger was restored from .*|"
            r"batch \d+ was trained with other settings: .*|version \d+ was published with the digest .*"
        )
        if not re.fullmatch(begun if place else "the start of the run", branch.why) or (place == 0 and b):
            yield f"branch {branch.branch} begins at batch {b} because of {branch.why!r}"
        parent = branch.branch


def batches_follow(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """Every batch, released or not, follows on the one before it; those where a later branch begins are released."""
    for batch in ledger.batches:
        version = _before(ledger, batch.branch, batch.b)
        left = any(b.branch > batch.branch and b.fork_batch <= batch.b for b in ledger.branches.values())
        if batch.version != version:
            yield f"{_name(batch)} was fixed at version {batch.version}; the batch before it makes {version}"
        if batch.released != left:
            yield f"{_name(batch)} is {'' if batch.released else 'not '}on a part of history that was left"
        if batch.outcome is None and ledger.fixed_on(batch.branch, batch.b + 1):
            yield f"{_name(batch)} is open, and a later one was fixed"


def groups_in_batches_are_in_issue_order(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """The groups of a batch are in issue order, at places without gaps."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for use in ledger.tables["uses"]:
        places[use["serial"]].append(use["place"])
    for batch in ledger.batches:
        if list(batch.groups) != sorted(batch.groups) or not (batch.groups or ledger.demonstrations.get(batch.serial)):
            yield f"{_name(batch)} holds groups {list(batch.groups)}, expected in issue order"
        if sorted(places.pop(batch.serial, [])) != list(range(len(batch.groups))):
            yield f"the places of groups in {_name(batch)} have gaps"
    for serial in places:
        yield f"groups are recorded for batch serial {serial}, which is not in the ledger"


def batches_hold_what_was_there(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """A batch holds complete groups, none with a trajectory that a later branch issued."""
    # Of a batch that was left, the disk may have lost some since, which then came again or not.
    lost = _touched_by_losses(ledger)
    for batch in ledger.batches:
        for number in batch.groups:
            excused = batch.released and number in lost
            if number in ledger.groups and not excused and not _complete_on(ledger, number, batch.branch):
                yield f"{_name(batch)} holds group {number}, which was not complete on its branch"


def _touched_by_losses(ledger: LedgerRows) -> set[int]:
    """Groups of which the disk has lost a trajectory."""
    return {number for (number, _), of_it in ledger.attempts.items() if any(a.ended == "lost" for a in of_it)}


def _complete_on(ledger: LedgerRows, number: int, branch: int) -> bool:
    """Whether all trajectories of a group are stored, none by a ticket of a branch after this one."""
    members = ledger.members.get(number, ())
    return len(members) >= ledger.groups[number].size and all((row.branch or 0) <= branch for row in members)


def first_uses_are_counted(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """A batch counts the groups that it is the first to use."""
    counted = {row["serial"]: row["first_uses"] for row in ledger.tables["batches"]}
    lines: dict[int, tuple[int, set[int]]] = {}  # by branch: the groups that its batches before this one used
    for batch in ledger.batches:
        until, used = lines.get(batch.branch, (0, set()))
        if until > batch.b:
            until, used = 0, set()
        for b in range(until, min(batch.b, len(ledger.batches))):
            earlier = ledger.batch_of(batch.branch, b)
            if earlier is not None and earlier.outcome == "applied":
                used.update(earlier.groups)
        lines[batch.branch] = max(0, batch.b), used
        if counted[batch.serial] != (first := len(set(batch.groups) - used)):
            yield f"{_name(batch)} counts {counted[batch.serial]} first uses, it holds {first}"


def starts_follow(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """A start of the learner is at a point of its branch, and stands at one; it holds the batch there or none."""
    branch = 0
    for row in ledger.tables["incarnations"]:
        start, now = (row["start_batch"], row["start_version"]), (row["next_batch"], row["version"])
        reached = [b for b in ledger.branches if b >= row["branch"] and _before(ledger, b, now[0]) == now[1]]
        if (
            not branch <= row["branch"]
            or row["branch"] not in ledger.branches
            or _before(ledger, row["branch"], start[0]) != start[1]
        ):
            yield f"start {row['incarnation']} was on branch {row['branch']} at batch {start[0]}, version {start[1]}"
        if not reached or row["holds"] not in (None, now[0]) or row["caused"] not in (0, 1):
            yield f"start {row['incarnation']} stands at batch {now[0]}, version {now[1]}, and holds {row['holds']}"
        branch = row["branch"]


def batches_are_of_their_start(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """Each batch was fixed by a start of the learner that passed there, in order."""
    starts = {row["incarnation"]: row for row in ledger.tables["incarnations"]}
    last = 0
    for row in ledger.tables["batches"]:
        by = starts.get(row["incarnation"])
        if by is None or row["incarnation"] < last or by["branch"] > row["branch"] or row["b"] < by["start_batch"]:
            yield f"batch {row['b']} of branch {row['branch']} cannot have been fixed by start {row['incarnation']}"
        last = row["incarnation"]


def curriculum_states_follow(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """There is one state of the curriculum before each batch, at the version that the batch is trained on."""
    states = [row for row in ledger.curriculum.values() if not row.released]
    expected = range(sum(batch.outcome is not None for batch in ledger.line) + 1)
    if [row.batch for row in states] != list(expected):
        yield f"states of the curriculum are recorded for batches {[row.batch for row in states]}, expected {expected}"
    for row in ledger.curriculum.values():
        if not any(_before(ledger, branch, row.batch) == row.version for branch in ledger.branches):
            yield f"the curriculum's state {row.serial} at batch {row.batch} is of version {row.version}"


def groups_have_the_state_of_their_draw(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """The states that drew the groups of a branch are in order; a prompt that is drawn again keeps its state."""
    last: Counter[int] = Counter()
    for group in ledger.groups.values():
        old = None if group.replaces is None else ledger.groups.get(group.replaces)
        if (old is not None and old.curriculum != group.curriculum) or group.curriculum < last[group.branch] * (
            not old
        ):
            yield f"group {group.number} was drawn by state {group.curriculum} of the curriculum, out of order"
        if old is None:
            last[group.branch] = group.curriculum


def publications_follow(ledger: LedgerRows, said: Said) -> Iterator[str]:
    """Versions were published while their branch had them, and with the digests that the learner reported."""
    for branch, version in ledger.published:
        row = ledger.branches.get(branch)
        reached = [b.version_after for b in ledger.batches if b.branch == branch]
        if row is None or not row.fork_version <= version <= max([row.fork_version, *reached]):
            yield f"version {version} was published on branch {branch}, which never had it"
    for p in said[1]:
        was = ledger.published.get((p.branch, p.version))
        at = ledger.restored_at(p.branch)
        lost = was is None and at is not None and p.version >= at[1]
        if was != p.digest and not lost:
            yield f"the learner published version {p.version} of branch {p.branch} as {p.digest}, not {was}"


def attempts_are_in_order(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """Attempts are numbered in the order of their issue, without gaps."""
    serials = [row["serial"] for row in ledger.tables["attempts"]]
    if sorted(serials) != list(range(len(serials))):
        yield f"{len(serials)} attempts are recorded, and their serials are not 0 to {len(serials) - 1}"
    for key, attempts in ledger.attempts.items():
        if (of_ticket := [a.serial for a in attempts]) != sorted(of_ticket):
            yield f"the attempts at trajectory {ledger.name(*key)} were not issued in their order: {of_ticket}"


def attempts_were_lent_with_published_weights(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """An attempt was lent on the branch and for the version that were published last, or an older that it carries."""
    published = sorted((row["attempts"], row["branch"], row["version"]) for row in ledger.tables["published"])
    latest = list(accumulate(((b, v) for _, b, v in published), max))
    begins = [n for n, _, _ in published]
    carried = _oldest_carried(ledger)
    for key, a in ((key, a) for key, attempts in ledger.attempts.items() for a in attempts):
        place = bisect.bisect_right(begins, a.serial)
        branch, current = latest[place - 1] if place else (None, None)
        name = f"attempt {a.attempt} at trajectory {ledger.name(*key)}"
        older = {oldest for oldest, first, last in carried[key] if first < a.attempt <= last}
        if a.min_version not in {current} | {min(oldest, current or 0) for oldest in older}:
            yield f"{name} was issued for version {a.min_version}, not {current}"
        if a.branch != branch:
            yield f"{name} was issued on branch {a.branch}; the branch was {branch} then"


def _oldest_carried(ledger: LedgerRows) -> defaultdict[tuple[int, int], list[tuple[int, int, float]]]:
    """By ticket, the oldest version of each recorded turn that it has had, the attempt that left it, and the
    last one that can have gone on with it: the one that failed, if that ended it."""
    failed = _failed(ledger)
    found: defaultdict[tuple[int, int], list[tuple[int, int, float]]] = defaultdict(list)
    for row in (row for row in ledger.tables["turns"] if row["oldest"] is not None):
        key, first = (row["grp"], row["idx"]), row["attempt"]
        ends = [n for n, reason in failed[key] if n >= first and reason not in GIVEN_UP]
        last = min(ends, default=math.inf) if row["ended"] in ("failed", "diverged") else math.inf
        found[key].append((row["oldest"], first, last))
    return found


def _failed(ledger: LedgerRows) -> defaultdict[tuple[int, int], list[tuple[int, str]]]:
    """By ticket, the attempts that failed, each with its reason."""
    found: defaultdict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for row in ledger.tables["attempts"]:
        if row["ended"] == "failed":
            found[row["grp"], row["idx"]].append((row["attempt"], str(row["detail"]).partition(":")[0]))
    return found


def attempts_end_once(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """An attempt that is leased is the last at an open ticket; of those that ended, one at most was stored."""
    newest = max(ledger.branches, default=0)
    for key, attempts in ledger.attempts.items():
        group, row = ledger.groups.get(key[0]), ledger.trajectories.get(key)
        closed = row is not None or group is None or group.state != "in_flight"
        wrong = {
            "an attempt {} is leased, and a later branch has begun": any(
                a.ended is None and a.branch < newest for a in attempts
            ),
            "an attempt {} is leased, and there is a later one": any(a.ended is None for a in attempts[:-1]),
            "the last attempt {} is leased, and its ticket is not open": attempts[-1].ended is None and closed,
            "an attempt {} ended as stored, and another one was stored": not (
                {a.attempt for a in attempts if a.ended == "stored"} <= {row and row.attempt}
            ),
        }
        yield from (text.format(f"at trajectory {ledger.name(*key)}") for text, found in wrong.items() if found)


def failures_have_a_reason(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """Attempts that failed say why, and no others."""
    for row in ledger.tables["attempts"]:
        if (row["ended"] == "failed") != (row["detail"] is not None):
            yield f"attempt {row['attempt']} at {row['grp']}.{row['idx']} is {row['ended']}: {row['detail']}"


def counters_cover_the_attempts(ledger: LedgerRows, _: Said) -> Iterator[str]:
    """No more attempts are late, or lost by the disk, than the buffer counted."""
    ended = Counter(a.ended for attempts in ledger.attempts.values() for a in attempts)
    for name in ("late", "lost"):
        counted = sum(n for (_, what), n in ledger.counters.items() if what == name)
        if ended[name] > counted:
            yield f"{ended[name]} attempts are {name}, and the buffer counted {counted}"
    for (branch, name), value in ledger.counters.items():
        if branch not in ledger.branches or name not in ("duplicate", "late", "lost") or value < 1:
            yield f"{value} puts are counted as {name} on branch {branch}"


def checkpoints_are_in_the_ledger(ledger: LedgerRows, said: Said) -> Iterator[str]:
    """A checkpoint is at a point of its branch, and every one that is complete was announced to the buffer."""
    known = {(row["branch"], row["batch"]) for row in ledger.tables["checkpoints"]}
    for row in ledger.tables["checkpoints"]:
        named = re.search(r"step-(\d+)", str(row["path"]).rpartition("/")[2])
        version = _before(ledger, row["branch"], row["batch"])
        if row["version"] != version or (named and int(named[1]) != version):
            yield f"checkpoint {row['path']} is of version {row['version']}; batch {row['batch']} has {version}"
    for done_list in said[0]:
        at = ledger.restored_at(done_list.branch)
        lost = at is not None and done_list.batch >= at[0]  # a checkpoint is announced behind the ledger in it
        if (done_list.branch, done_list.batch) not in known and not lost:
            yield f"{done_list.checkpoint} at batch {done_list.batch} of branch {done_list.branch} was never announced"


def the_newest_checkpoint_is_there(_: LedgerRows, said: Said) -> Iterator[str]:
    """The last checkpoint that the learner reported as complete is there, or a newer one."""
    named = re.fullmatch(r"step-(\d+)(?:-b(\d+)-br(\d+))?", said[2][-1]) if said[2] else None
    place = (int(named[3] or 0), int(named[2] or named[1])) if named else (0, -1)
    if place > max(((each.branch, each.batch) for each in said[0]), default=(0, -1)):
        yield f"the learner reported {said[2][-1]} as complete, and neither it nor a newer checkpoint is there"


def _before(ledger: LedgerRows, branch: int, b: int) -> int | None:
    """The version that batch b is trained on, seen from `branch`; None: it was not reached."""
    batch = ledger.batch_of(branch, b - 1) if b > 0 else None
    return 0 if b == 0 else None if batch is None else batch.version_after


def _name(batch: BatchRow) -> str:
    return f"batch {batch.b} of branch {batch.branch}"


HISTORY: tuple[Check, ...] = (
    rows_are_numbered,
    branches_follow,
    batches_follow,
    groups_in_batches_are_in_issue_order,
    batches_hold_what_was_there,
    first_uses_are_counted,
    starts_follow,
    batches_are_of_their_start,
    curriculum_states_follow,
    groups_have_the_state_of_their_draw,
    publications_follow,
    attempts_are_in_order,
    attempts_were_lent_with_published_weights,
    attempts_end_once,
    failures_have_a_reason,
    counters_cover_the_attempts,
    checkpoints_are_in_the_ledger,
    the_newest_checkpoint_is_there,
)
