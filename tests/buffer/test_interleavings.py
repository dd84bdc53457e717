"""Any interleaving of requests, crashes and restarts keeps the promises: hypothesis drives the core."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncrl.audit.checks.accounting import staleness
from asyncrl.audit.checks.bounds import bounds as bounds_of_batches
from asyncrl.audit.checks.drops import (
    discarded_groups_were_left_behind,
    stale_groups_were_too_old,
    trained_groups_have_no_use_left,
)
from asyncrl.audit.checks.history import attempts_end_once, attempts_were_lent_with_published_weights
from asyncrl.audit.checks.lengths import lengths
from asyncrl.audit.checks.replays import replays
from asyncrl.audit.checks.slots import slots
from asyncrl.audit.checks.stored.turns import turns
from asyncrl.audit.checks.tasks.curriculum import curriculum
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.client.messages import Told
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.records import Draw
from asyncrl.buffer.replaying import PRIORITIES, Replaying
from asyncrl.buffer.rules import Refused
from asyncrl.buffer.selection import SAMPLERS, zero_variance
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from asyncrl.trajectory.turns import Recorded, RecordedSample, successors
from asyncrl.wire.turns import decode_turn, encode_turn
from tests.buffer.fakes import FakeCurriculum, FakeSource, open_buffer, put, trajectory
from tests.buffer.promises import Promises
from tests.buffer.tickets import test_turns as recorded_turns
from tests.buffer.tickets.test_turns import played

ACTORS = ("a", "b")
DECIDED = "SELECT serial, bound, measures, target, next_bound, since, why, slots, lent, slots_why FROM batches"


class Interleavings(Promises):
    """Keeps, outside the buffer, what actors and learner were told."""

    @initialize(
        over_age=st.sampled_from(["drop", "wait", "mask"]),
        max_staleness=st.integers(0, 2),
        max_uses=st.integers(1, 2),
        sampler=st.sampled_from(sorted(SAMPLERS)),
        filtered=st.booleans(),
        replayed=st.sampled_from(["", *PRIORITIES]),
        durable=st.sampled_from([False, True, "auto"]),
    )
    def begin(
        self,
        over_age: str,
        max_staleness: int,
        max_uses: int,
        sampler: str,
        filtered: bool,
        replayed: str,
        durable: bool | str,
    ) -> None:
        self.options = {
            "durable": durable is True,
            "turns_auto_s": 1.0 if durable == "auto" else None,
            "over_age": over_age,
            "max_staleness": max_staleness,
            "max_uses": max_uses,
            "sampler": SAMPLERS[sampler],
            "filters": (zero_variance,) if filtered else (),
            "filter_max_ratio": 1.0,
            "capacity": 16,
            "steps": 1000,
            "wait_s": 5.0,
            "lease_s": 10.0,
            "env_retries": 1,
            "max_skipped": 1000,
            "mask_min_kept": 0.5,
        }
        if replayed:
            # Priorities that are 0 for many groups, and that depend on the version.
            replay = Replaying(2, PRIORITIES[replayed], exponent=0.6, beta=0.4, half_life=2.0)
            uses = {"max_uses": max_uses + 1, "max_staleness": max_staleness + 1, "sampler": SAMPLERS["fifo"]}
            self.options |= {"replay": replay} | uses
        self.options |= self.other_options()
        self.folder = Path(tempfile.mkdtemp(prefix="asyncrl-test-"))
        self.source = FakeSource(train_size=5)
        self.now = 0.0
        self.buffer = self.open()
        self.tickets: list[Ticket] = []
        self.said: dict[tuple[TicketId, int], list[Recorded]] = {}
        """What each attempt has of its episode: the turns that came with its ticket, and those that it recorded."""
        self.stored: dict[tuple[int, int], Trajectory] = {}
        self.fixed: dict[int, tuple[tuple[int, ...], Draw]] = {}
        self.checkpoints: list[tuple[int, int, int | None]] = [(0, 0, None)]
        self.branch = 0
        self.over_full = False
        self.ready: int | None = None
        self.incarnation = -1
        self.start_learner(0, False, True)

    def other_options(self) -> dict[str, Any]:
        return {}

    def told(self) -> Told | None:
        """What the learner tells of a batch that ends."""
        return None

    def open(self) -> Buffer:
        return open_buffer(self.folder, self.now, self.source, FakeCurriculum(), **self.options)

    def commit(self) -> None:
        self.buffer.commit(self.now)
        branch = self.buffer.ledger.history.branch
        if branch != self.branch:
            # History forked: what was fixed from there on is void, and released groups may overfill the buffer.
            self.branch, self.over_full = branch, True
            self.fixed = {b: groups for b, groups in self.fixed.items() if b < len(self.buffer.ledger.history.line)}

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.database.close()
            ledger = read_ledger(self.folder)
            # Recorded turns: each has its attempt, and each that was continued is in its trajectory, token for token.
            files = PayloadFiles(self.folder / "payloads")
            assert list(turns(ledger, files.read)) == []
            files.close()
            shutil.rmtree(self.folder)
            # Through all crashes and forks: every draw, and every state of the curriculum, made again from the ledger.
            assert list(curriculum(ledger, FakeCurriculum())) == []
            last = [row for row in ledger.curriculum.values() if not row.released][-1]
            assert last.batch == sum(batch.outcome is not None for batch in ledger.line)
            # What was replayed is drawn again from the ledger, and every end of a used group follows from it.
            taken = {n: self.options[n] for n in ("max_uses", "max_staleness", "over_age", "mask_min_kept")}
            rest = {n: self.options[n] for n in ("replay", "auto", "tuning") if n in self.options}
            recorded = {n: self.options[n] for n in ("durable", "turns_auto_s")}
            bounds = Bounds(groups_per_step=2, **taken, **rest, **recorded)
            assert list(lengths(ledger, (bounds,))) == []
            assert list(replays(ledger, (bounds,))) == []
            assert list(trained_groups_have_no_use_left(ledger, (bounds,))) == []
            # Every use is within the bound of its batch, every bound and every drop follows from what was decided.
            assert list(staleness(ledger, bounds)) == []
            assert list(bounds_of_batches(ledger, (bounds,))) == []
            assert list(slots(ledger, (bounds,))) == []
            assert list(stale_groups_were_too_old(ledger, (bounds,))) == []
            # Attempts are of the branch whose weights they were lent with; what a branch could have produced stays.
            assert list(discarded_groups_were_left_behind(ledger, ())) == []
            for check in (attempts_end_once, attempts_were_lent_with_published_weights):
                assert list(check(ledger, ([], [], []))) == []

    # Actors

    @rule(actor=st.sampled_from(ACTORS), credits=st.integers(1, 6))
    def issue(self, actor: str, credits: int) -> None:
        history = self.buffer.ledger.history
        held = (history.branch, history.published or 0)
        issued, why = self.buffer.issue(self.now, actor, held, credits)
        assert len(issued) == credits or why
        self.commit()
        self.tickets = (self.tickets + issued)[-60:]
        for ticket in issued:
            assert ticket.durable <= (self.options["durable"] or self.options["turns_auto_s"] is not None)
            self.said[ticket.id, ticket.attempt] = [*ticket.turns]

    def made(self, data: Any, ticket: Ticket) -> Trajectory:
        """With recorded turns it goes on behind them, or starts over."""
        samples = [r for r in self.said[ticket.id, ticket.attempt] if isinstance(r, RecordedSample)]
        if samples and data.draw(st.integers(0, 3)):
            return replace(played(ticket, samples), timings={"total": data.draw(st.sampled_from([0.5, 2.0]))})
        first = ticket.min_version[1]
        last = max(first, self.buffer.ledger.history.recorded_version)
        versions = sorted(data.draw(st.lists(st.integers(first, last), min_size=1, max_size=3)))
        return trajectory(ticket, tuple(versions), float(data.draw(st.integers(0, 1))))

    @rule(data=st.data())
    def play(self, data: Any) -> None:
        """The first valid put wins, also of a lapsed or revoked attempt; later ones are duplicate or late."""
        if not self.tickets:
            return
        ticket = data.draw(st.sampled_from(self.tickets))
        made = self.made(data, ticket)
        key = (ticket.id.group, ticket.id.index)
        outcome = put(self.buffer, made)
        self.commit()
        if key in self.stored:
            assert outcome == ("duplicate" if self.stored[key].digest() == made.digest() else "late")
        elif outcome == "stored":
            self.stored[key] = made
        else:
            assert outcome == "late"

    @rule(data=st.data())
    def repeat(self, data: Any) -> None:
        if self.stored:
            again = self.stored[data.draw(st.sampled_from(sorted(self.stored)))]
            assert put(self.buffer, again) == "duplicate"
            self.commit()

    @rule(
        data=st.data(),
        times=st.integers(1, 5),
        partial=st.booleans(),
        restart=st.sampled_from([False] * 5 + [True]),
        full=st.sampled_from([False] * 5 + [True]),
    )
    def record(self, data: Any, times: int, partial: bool, restart: bool, full: bool) -> None:
        """The next turns of an episode: stored of the attempt that holds the ticket, unless the disk is `full`; of
        others revoked."""
        if not self.tickets:
            return
        ticket = data.draw(st.sampled_from(self.tickets[-8:]))
        said = self.said[ticket.id, ticket.attempt]
        if restart and len(said) == len(ticket.turns):  # an attempt that has recorded nothing begins again
            said.clear()
        kept = self.buffer.tickets.carried.turns
        most, kept.most_bytes = kept.most_bytes, 0.0 if full else kept.most_bytes
        for _ in range(times):
            record = self.next_record(said, ticket, partial and data.draw(st.booleans()))
            for actor in ACTORS:
                lease = self.buffer.leases.get(ticket.id.group, ticket.id.index)
                holds = lease is not None and lease.is_of((ticket.id, ticket.attempt), actor)
                refused = ""
                try:
                    id, attempt, turn = decode_turn(encode_turn(ticket.id, ticket.attempt, record))
                    outcome = self.buffer.record_turn(actor, id, attempt, turn)
                except Refused as error:
                    refused = error.code
                if refused:  # also the rest of a sample that this attempt has handed over itself
                    mine = bool(said) and said[-1].form == "partial"
                    assert (holds, refused) == (True, "bad_turn" if ticket.durable and mine else "not_durable")
                else:
                    assert outcome == (("full" if full else "stored") if holds else "revoked")
                    said += [record] if outcome == "stored" else []
        kept.most_bytes = most
        self.commit()

    def next_record(self, said: list[Recorded], ticket: Ticket, partial: bool) -> Recorded:
        """Behind what the attempt has of its episode. An interrupted sample is whole then, with the same beginning. In
        groups with an odd number an agent plays: it has replies alone, and a reset only where it begins again."""
        version, agent = self.buffer.ledger.history.recorded_version, bool(ticket.id.group % 2)
        if not said and not (agent and not ticket.turns):
            return recorded_turns.RESET
        number, answer = 0, False
        if said:
            number, answer = next(iter(successors((said[-1].place[0], said[-1].form))))
        if agent:
            newest = max(version, ticket.min_version[1])
            return recorded_turns.sample(number, newest, summary=True, beside=number % 2)
        if answer:
            return recorded_turns.answer(number)
        if isinstance(said[-1], RecordedSample) and said[-1].partial:
            old = said[-1].versions[0]
            return recorded_turns.sample(number, int(old), tokens=5)
        reason = "abort" if partial else "stop"
        return recorded_turns.sample(number, max(version, ticket.min_version[1]), stop_reason=reason)

    @rule(data=st.data(), how=st.sampled_from(["fail", "release", "renew"]))
    def give_up(self, data: Any, how: str) -> None:
        if not self.tickets:
            return
        ticket = data.draw(st.sampled_from(self.tickets))
        for actor in ACTORS:
            if how == "fail":
                with suppress(Refused):  # of another actor
                    self.buffer.fail(actor, ticket.id, ticket.attempt, "env_error", "boom")
            elif how == "release":
                with suppress(Refused):  # of another actor
                    self.buffer.release(actor, [(ticket.id, ticket.attempt)])
            elif how == "renew":
                self.buffer.renew(self.now, actor, [(ticket.id, ticket.attempt)])
        self.commit()

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.buffer.tick(self.now)
        self.commit()

    @rule(actor=st.sampled_from(ACTORS))
    def actor_restarts(self, actor: str) -> None:
        self.buffer.joined(actor)
        self.commit()
        assert actor not in {lease.actor for lease in self.buffer.leases}

    # The learner

    def next_batch(self) -> int:
        current = self.buffer.ledger.history.current
        assert current is not None
        return current.next_batch

    def ask(self) -> None:
        b = self.next_batch()
        answer = self.buffer.batch(self.now, self.incarnation, b)
        self.commit()
        self.ready = None
        if answer.state == "skipped":
            assert self.next_batch() == b + 1
        elif answer.state == "ready":
            assert answer.batch is not None
            self.ready = b
            made = answer.batch.groups, answer.batch.replay
            assert self.fixed.setdefault(b, made) == made
            records = [d for rank in range(2) for _, d, _ in self.buffer.share(answer, rank, 2)]
            groups = answer.batch.groups
            assert sorted(records) == sorted(self.stored[g, i].digest() for g in groups for i in range(2))

    @rule()
    def batch(self) -> None:
        self.ask()

    @precondition(lambda self: self.ready is not None)
    @rule(outcome=st.sampled_from(["applied", "applied", "applied", "guard"]))
    def finish(self, outcome: Any) -> None:
        assert self.ready is not None
        before = self.buffer.ledger.history.version
        version = self.buffer.finished(self.incarnation, self.ready, outcome, self.told(), self.now)
        self.commit()
        assert version == before + (outcome == "applied")
        if self.buffer.ledger.history.branch == self.branch:
            batch = self.buffer.ledger.history.line[self.ready]
            self.fixed.setdefault(self.ready, (batch.groups, batch.replay))
        decided = self.sql(DECIDED)
        assert self.buffer.finished(self.incarnation, self.ready, outcome, self.told(), self.now + 9) == version
        self.commit()
        again = self.sql(DECIDED)
        assert again == decided, "a repeat decides nothing"
        self.ready = None
        self.publish()

    @rule(times=st.integers(1, 4), slow=st.integers(0, 3))
    def rounds(self, times: int, slow: int) -> None:
        """The ordinary way: issue, play, train. One group in four may be slow: it is played some other time."""
        for _ in range(times):
            self.issue("a", 6)
            for ticket in self.tickets:
                if ticket.id.group % 4 != slow:
                    made = trajectory(ticket, (ticket.min_version[1],), float(ticket.id.index % 2))
                    made = replace(made, timings={"total": ticket.id.group % 3})
                    if put(self.buffer, made) == "stored":
                        self.stored[ticket.id.group, ticket.id.index] = made
            self.commit()
            self.ask()
            if self.ready is not None:
                self.finish("applied")

    def publish(self) -> None:
        history = self.buffer.ledger.history
        if history.published is None or history.version > history.published:
            self.buffer.published(self.incarnation, history.branch, history.version, f"{history.version}")
            self.commit()

    @rule()
    def checkpoint(self) -> None:
        history = self.buffer.ledger.history
        path = self.folder / "checkpoint"
        path.mkdir(exist_ok=True)
        self.buffer.checkpointed(self.now, self.incarnation, history.version, self.next_batch(), path)
        self.checkpoints = [*self.checkpoints, (self.next_batch(), history.version, history.branch)][-2:]

    @rule(which=st.integers(0, 1), fresh=st.sampled_from([False, False, True]), caused=st.booleans())
    def start_learner(self, which: int, fresh: bool, caused: bool) -> None:
        b, version, branch = self.checkpoints[min(which, len(self.checkpoints) - 1)]
        fenced = self.incarnation
        try:
            started = self.buffer.start(b, version, branch, fresh=fresh, caused=caused)
        except Refused:
            # A checkpoint of a part of history that was left: the learner takes another one, or the initial weights.
            assert not self.buffer.ledger.history.on_line(branch or 0, b)
            self.checkpoints = [c for c in self.checkpoints if c != (b, version, branch)] or [(0, 0, None)]
            return
        self.incarnation, self.ready = started.incarnation, None
        assert (started.batch, started.version) == (b, version)
        self.commit()
        self.publish()
        with pytest.raises(Refused, match="fenced off"):
            self.buffer.batch(self.now, fenced, 0)

    @rule()
    def learner_dies_of_a_batch(self) -> None:
        """Twice in a row with the same batch in hand: the third learner skips it."""
        begun = self.incarnation
        self.start_learner(1, False, False)
        held = []
        for _ in range(2):
            self.ask()
            held.append(self.ready)
            self.start_learner(1, False, False)
        if self.incarnation == begun + 3 and held[0] is not None and held[0] == held[1]:
            assert self.buffer.ledger.history.line[held[0]].outcome == "poison"

    # Crashes

    @rule()
    def crash(self) -> None:
        self.buffer.database.close()
        self.buffer = self.open()
        assert self.buffer.lost_to_disk == 0

    @rule(data=st.data())
    def power_cut(self, data: Any) -> None:
        """Takes a trajectory that was not flushed: once a learner has started, it is generated again."""
        self.buffer.database.close()
        found = self.sql(
            "SELECT grp, idx, segment, start FROM groups JOIN trajectories ON grp = number "
            "WHERE state IN ('in_flight', 'waiting') AND uses = 0 AND segment IN (SELECT DISTINCT segment FROM groups "
            "JOIN trajectories ON grp = number WHERE payload = 1 ORDER BY segment DESC LIMIT 2) "
            "AND segment > coalesce((SELECT CAST(value AS INTEGER) FROM kv WHERE key = 'covered_segment'), -1)"
        )
        if found:
            group, index, segment, start = data.draw(st.sampled_from(sorted(found)))
            with (self.folder / "payloads" / f"{segment:08d}.segment").open("r+b") as file:
                file.seek(start)
                file.write(b"\xff")
        self.buffer = self.open()
        assert self.buffer.lost_to_disk == bool(found)
        if found:
            assert self.buffer.issue(self.now, "a", (99, 99), 1)[0] == []
            while self.buffer.losses.pending:
                self.start_learner(0, False, False)
            del self.stored[group, index]

    @rule(data=st.data(), what=st.sampled_from(["put", "issue", "batch", "finished", "tick"]))
    def crash_before_the_commit(self, data: Any, what: str) -> None:
        """What was decided and not committed was told to no process, and has never happened."""
        if what == "put" and self.tickets:
            put(self.buffer, self.made(data, data.draw(st.sampled_from(self.tickets))))
        elif what == "issue":
            history = self.buffer.ledger.history
            self.buffer.issue(self.now, "a", (history.branch, history.published or 0), 5)
        elif what == "batch":
            self.buffer.batch(self.now, self.incarnation, self.next_batch())
        elif what == "finished" and self.ready is not None:
            self.buffer.finished(self.incarnation, self.ready, "applied")
        elif what == "tick":
            self.buffer.tick(self.now + 1000)
        self.crash()


EVERY = list(HealthCheck)
Interleavings.TestCase.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=EVERY
)
test_interleavings = Interleavings.TestCase


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_interleavings() -> None:
    thorough = settings(max_examples=500, stateful_step_count=60, deadline=None, suppress_health_check=EVERY)
    run_state_machine_as_test(Interleavings, settings=thorough)
