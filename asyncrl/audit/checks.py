"""What must hold between the witnesses of a run. Pure: every check yields a sentence for each contradiction.

draws             each draw was made once, none was skipped, and each is the task that the data seed says
curriculum        each draw, and each state, is what the curriculum makes of what was before it (curriculum.py)
rows              the ledger names no trajectory, attempt or use of a group that it does not have
equation          every group is in the one state that its trajectories and batches say
uses              batches are whole, in one line, and hold no group more often than allowed
staleness         the bound, at every use, from the stored versions
acknowledgements  what an actor was told is stored is in the ledger, the same
learner           the learner trained the groups that the ledger says, byte for byte
payloads          what lies on disk is what was recorded (payloads.py)
prefixes          what interrupted attempts handed back is where the ledger says (prefixes.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

from asyncrl.audit.curriculum import curriculum
from asyncrl.audit.ledger import GroupRow, LedgerRows
from asyncrl.audit.payloads import payloads
from asyncrl.audit.prefixes import prefixes
from asyncrl.audit.witnesses import Ack, AckLines, Evidence, LearnerList, Limits
from asyncrl.buffer.ledger.group import Reason
from asyncrl.learner.checkpoints import group_digests

REASONS = get_args(Reason)


@dataclass(frozen=True, slots=True)
class Violation:
    check: str
    what: str

    def __str__(self) -> str:
        return f"{self.check}: {self.what}"


def violations(evidence: Evidence) -> Iterator[Violation]:
    ledger, limits = evidence.ledger, evidence.limits
    found: dict[str, Iterator[str]] = {
        "rows": rows(ledger),
        "draws": draws(ledger, evidence.task_of),
        "curriculum": curriculum(ledger, evidence.curriculum),
        "acknowledgements": (text for log in evidence.acks for text in acknowledgements(ledger, log)),
        "equation": equation(ledger),
        "uses": uses(ledger, limits),
        "staleness": staleness(ledger, limits),
        "learner": (text for said in evidence.lists for text in learner(ledger, said)),
        "payloads": payloads(ledger, evidence.payload),
        "prefixes": prefixes(ledger, evidence.payload),
    }
    for check, texts in found.items():
        yield from (Violation(check, text) for text in texts)


def rows(ledger: LedgerRows) -> Iterator[str]:
    for expected, number in enumerate(ledger.groups):
        if number != expected:
            yield f"group {expected} is missing from the ledger: groups are numbered without gaps"
            break
    for (number, index), attempts in ledger.attempts.items():
        name = ledger.name(number, index)
        group = ledger.groups.get(number)
        if group is None or index >= group.size:
            yield f"attempts at trajectory {name} are recorded, and the ledger has no such ticket"
            continue
        if [a.attempt for a in attempts] != list(range(len(attempts))):
            yield f"attempts at trajectory {name} are {[a.attempt for a in attempts]}, expected 0, 1, ... without gaps"
        if any(a.ended == "stored" for a in attempts) and (number, index) not in ledger.trajectories:
            yield f"trajectory {name} is missing from the ledger: an attempt at it ended as stored"
    for (number, index), row in ledger.trajectories.items():
        name = ledger.name(number, index)
        if number not in ledger.groups:
            yield f"trajectory {name} is stored, and the ledger has no group {number}"
            continue
        attempt = next((a for a in ledger.attempts.get((number, index), ()) if a.attempt == row.attempt), None)
        if attempt is None:
            yield f"trajectory {name} was stored from attempt {row.attempt}, which is not in the ledger"
        elif attempt.ended not in ("stored", "lost"):
            yield f"trajectory {name} was stored from attempt {row.attempt}, which ended as {attempt.ended}"
        elif attempt.actor != row.actor:
            yield f"trajectory {name} is of {row.actor}, its ticket was lent to {attempt.actor}"
        elif row.oldest < attempt.min_version:
            yield (
                f"trajectory {name} has tokens of version {row.oldest}; {row.actor} held at least version "
                f"{attempt.min_version} when the ticket was lent"
            )
        if sum(count for _, count in row.versions) != row.policy_tokens:
            yield f"trajectory {name} has {row.policy_tokens} policy tokens, its versions count {row.versions}"


def draws(ledger: LedgerRows, task_of: Callable[[int], tuple[str, int]]) -> Iterator[str]:
    first: dict[int, int] = {}
    again: dict[int, int] = {}
    for group in ledger.groups.values():
        expected, size = task_of(group.task)
        if expected != group.task_id:
            yield f"group {group.number} (draw {group.draw}) is of task {group.task_id!r}; the seed says {expected!r}"
        if size != group.size:
            yield f"group {group.number} (task {group.task_id!r}) is of size {group.size}; its source says {size}"
        if group.replaces is None:
            if group.draw in first:
                yield f"draw {group.draw} was made twice: groups {first[group.draw]} and {group.number}"
            first[group.draw] = group.number
            continue
        old = ledger.groups.get(group.replaces)
        if old is None or old.state != "dropped" or old.draw != group.draw:
            was = "is not in the ledger" if old is None else f"is {old.state}, of draw {old.draw}"
            yield f"group {group.number} (draw {group.draw}) was drawn again for group {group.replaces}, which {was}"
        elif group.replaces in again or old.put_back:
            yield f"the prompt of group {old.number} was put back once and is to be drawn, or was drawn, twice"
        again[group.replaces] = group.number
    for draw in range(ledger.next_draw):
        if draw not in first:
            yield f"draw {draw} was skipped: the cursor stands at {ledger.next_draw} and no group has it"
    for draw in sorted(first):
        if draw >= ledger.next_draw:
            yield f"draw {draw} (group {first[draw]}) was made, and the cursor stands at {ledger.next_draw}"
    for group in ledger.groups.values():
        if group.reason == "discarded_branch" and not group.put_back and group.number not in again:
            yield f"the prompt of group {group.number} (dropped: discarded_branch) was not put back"


def equation(ledger: LedgerRows) -> Iterator[str]:
    """That the states, as recorded, are those that trajectories and batches imply; so their sum is what was issued."""
    applied: Counter[int] = Counter()
    open_, ended_as = set(), {}
    for batch in ledger.line:
        for number in batch.groups:
            applied[number] += batch.outcome == "applied"
            if batch.outcome is None:
                open_.add(number)
            ended_as[number] = batch.outcome
    for group in ledger.groups.values():
        problem = _state(group, len(ledger.members.get(group.number, ())), applied[group.number], group.number in open_)
        if problem:
            yield f"group {group.number} {problem}"
        elif group.reason in ("guard", "poison") and ended_as.get(group.number) != group.reason:
            yield f"group {group.number} is dropped: {group.reason}, and no batch with this outcome holds it"


def _state(group: GroupRow, stored: int, applied: int, in_open_batch: bool) -> str | None:
    said = group.state if group.reason is None else f"{group.state}: {group.reason}"
    if (group.reason is not None) != (group.state == "dropped") or (group.reason or REASONS[0]) not in REASONS:
        return f"is {said}, which is no state with a named reason"
    if group.uses != applied:
        return f"counts {group.uses} uses, applied batches hold it {applied} times"
    if (group.state == "assigned") != in_open_batch:
        return f"is {said}, and {'the open batch holds it' if in_open_batch else 'no open batch holds it'}"
    if group.state in ("waiting", "assigned", "trained") and stored != group.size:
        return f"is {said}, and {stored} of its {group.size} trajectories are stored"
    if group.state == "in_flight" and stored == group.size:
        return "is in flight, and all its trajectories are stored"
    if group.state == "trained" and not applied:
        return "is trained, and no applied batch holds it"
    if group.state == "dropped" and applied:
        return f"is {said}, and an applied batch holds it"
    if group.state in ("in_flight", "waiting", "assigned", "trained", "dropped"):
        return None
    return f"is {said}, which is no state"


def uses(ledger: LedgerRows, limits: Limits) -> Iterator[str]:
    version = 0
    seen: Counter[int] = Counter()
    for expected, batch in enumerate(ledger.line):
        if batch.b != expected:
            yield f"batch {expected} is missing from the ledger: batches are numbered without gaps"
            return
        if batch.version != version:
            yield f"batch {batch.b} was fixed at version {batch.version}; the outcomes before it make {version}"
        if batch.outcome is None and batch is not ledger.line[-1]:
            yield f"batch {batch.b} is open, and a later one was fixed"
        version += batch.outcome == "applied"
        for number, times in Counter(batch.groups).items():
            seen[number] += 1
            if times > 1:
                yield f"batch {batch.b} holds group {number} {times} times"
            if number not in ledger.groups:
                yield f"batch {batch.b} holds group {number}, which is not in the ledger"
            elif seen[number] == limits.max_uses + 1:
                yield f"group {number} is used again in batch {batch.b}; buffer.max_uses is {limits.max_uses}"
        if len(batch.groups) != limits.groups_per_step:
            yield f"batch {batch.b} holds {len(batch.groups)} groups, a whole one has {limits.groups_per_step}"


def staleness(ledger: LedgerRows, limits: Limits) -> Iterator[str]:
    for batch in ledger.batches:
        for number in batch.groups:
            members = ledger.members.get(number, ())
            for row in members:
                name = ledger.name(number, row.index)
                if row.newest > batch.version and not batch.released:
                    yield f"trajectory {name} has version {row.newest}, ahead of batch {batch.b}'s {batch.version}"
                elif batch.version - row.oldest > limits.max_staleness and limits.over_age != "mask":
                    yield (
                        f"trajectory {name} is {batch.version - row.oldest} versions old in batch {batch.b}; "
                        f"buffer.max_staleness is {limits.max_staleness}"
                    )
            kept = sum(row.tokens_since(batch.version - limits.max_staleness) for row in members)
            total = sum(row.policy_tokens for row in members)
            if limits.over_age == "mask" and members and (not kept or kept < limits.mask_min_kept * total):
                yield (
                    f"group {number} keeps {kept} of {total} tokens in batch {batch.b}; buffer.mask_min_kept is "
                    f"{limits.mask_min_kept}"
                )


def acknowledgements(ledger: LedgerRows, log: AckLines) -> Iterator[str]:
    for line in log.unreadable:
        yield f"acks/{log.actor}.jsonl line {line} is no acknowledgement"
    for n in log.missing:
        yield f"acks/{log.actor}.jsonl lacks acknowledgement {n}: the lines are numbered without gaps"
    for ack in log.acks:
        problem = contradiction(ledger, ack)
        if problem:
            yield f"{log.actor} was told that {ack.branch}.{ack.group}.{ack.index} is stored, and {problem}"


def contradiction(ledger: LedgerRows, ack: Ack) -> str | None:
    """What the ledger says otherwise; a loss that the failure model allows is none (`loss`)."""
    if loss(ledger, ack):
        return None
    group, row = ledger.groups.get(ack.group), ledger.trajectories.get((ack.group, ack.index))
    if group is None or group.branch != ack.branch:
        return f"the ledger has no group {ack.group} on branch {ack.branch}"
    if row is None:
        return "the ledger does not have it"
    if row.digest != ack.digest:
        return f"the ledger has digest {row.digest}, the actor {ack.digest}"
    if ack.attempt not in (a.attempt for a in ledger.attempts.get((ack.group, ack.index), ())):
        return f"its attempt {ack.attempt} is not in the ledger"
    return None


def loss(ledger: LedgerRows, ack: Ack) -> str | None:
    """`host`: it went down with the buffer's host, and the run went on from a checkpoint. `disk`: the buffer found its
    bytes gone after a power cut (`buffer.fsync` bounds that), and had it generated again. None: it was not lost."""
    group, row = ledger.groups.get(ack.group), ledger.trajectories.get((ack.group, ack.index))
    if row is not None and row.digest == ack.digest and group is not None and group.branch == ack.branch:
        return None
    attempts = ledger.attempts.get((ack.group, ack.index), ())
    if any(a.attempt == ack.attempt and a.ended == "lost" for a in attempts):
        return "disk"
    known = group is not None and group.branch == ack.branch
    # What the new branch will drop is still in flight while no learner has begun it.
    discarded = group is not None and (group.reason == "discarded_branch" or (ledger.restored and row is None))
    if ledger.lost_with_host(ack.branch) and (not known or discarded):
        return "host"
    return None


def learner(ledger: LedgerRows, said: LearnerList) -> Iterator[str]:
    if [done.batch for done in said.done] != list(range(said.batch)):
        yield f"the list in {said.checkpoint} does not name the batches 0 to {said.batch - 1}, each once"
    for done in said.done:
        batch = ledger.batch_of(said.branch, done.batch)
        where = f"batch {done.batch} in the learner's list ({said.checkpoint})"
        if batch is None:
            if not ledger.lost_with_host(said.branch):
                yield f"{where} is not in the ledger"
            continue
        if done.outcome != batch.outcome and not (done.outcome == "skipped" and batch.outcome in ("guard", "poison")):
            yield f"{where} is {done.outcome}, the ledger says {batch.outcome or 'open'}"
        if done.outcome == "skipped":
            continue
        if sorted(done.groups) != sorted(batch.groups):
            yield f"{where} holds groups {sorted(done.groups)}, the ledger says {sorted(batch.groups)}"
            continue
        for number, digest in done.groups.items():
            digests = tuple(row.digest for row in ledger.members.get(number, ()))
            if group_digests([number] * len(digests), digests).get(number) != digest:
                yield f"group {number} of {where} is of another digest than the ledger's trajectories"
