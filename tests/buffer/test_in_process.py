"""The whole way of a trajectory through the real core and ledger in this process, without a socket."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.buffer.client import BufferClient, BufferRefused, LedgerRestored
from asyncrl.buffer.in_process import InProcessBuffer, VirtualClock
from asyncrl.config import Config
from asyncrl.trajectory import Ticket
from tests.buffer.fakes import FakeSource, rules, trajectory


def opened(folder: Path | None = None, clock: VirtualClock | None = None, **changes: object) -> InProcessBuffer:
    return InProcessBuffer(rules(**changes), FakeSource(), folder=folder, clock=clock)


def learner(buffer: InProcessBuffer) -> int:
    started = buffer.start(0, 0, None)
    buffer.published(started.incarnation, started.branch, 0, "digest-0")
    return started.incarnation


def play(buffer: InProcessBuffer, tickets: list[Ticket], version: int, actor: str = "actor-0") -> list[str]:
    made = [trajectory(ticket, (version,), float(ticket.id.index)) for ticket in tickets]
    return [buffer.put(replace(one, actor=actor)) for one in made]


def test_a_trajectory_from_its_ticket_to_the_training_step() -> None:
    with opened() as buffer:
        incarnation = learner(buffer)
        assert buffer.hello("actor").published == 0
        for version in range(3):
            tickets = buffer.tickets("actor-0", (0, version), 4, [], 0.0).tickets
            assert play(buffer, tickets, version) == ["stored"] * len(tickets)
            reply = buffer.batch(incarnation, version, 0, 1, 0.0)
            assert (reply.state, len(reply.trajectories), len(reply.groups)) == ("ready", 4, 2)
            assert [t.digest() for t in reply.trajectories] == list(reply.digests)
            again = buffer.batch(incarnation, version, 1, 2, 0.0)
            assert (again.groups, len(again.trajectories)) == (reply.groups, 2)
            assert buffer.finished(incarnation, version, "applied") == version + 1
            buffer.published(incarnation, 0, version + 1, f"digest-{version + 1}")
        assert buffer.status()["equation"]["0"] == {"issued": 6, "trained": 6}


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_the_staleness_bound_holds_however_late_a_trajectory_comes(bound: int) -> None:
    """An actor keeps one group of version 0 until the learner is past the bound; then it is dropped, never trained."""
    with opened(max_staleness=bound, capacity=100) as buffer:
        incarnation = learner(buffer)
        late = buffer.tickets("actor-0", (0, 0), 2, [], 0.0).tickets
        for version in range(bound + 2):
            while (reply := buffer.batch(incarnation, version, 0, 1, 0.0)).state == "waiting":
                tickets = buffer.tickets("actor-1", (0, version), 2, [], 0.0).tickets
                assert tickets, reply.why
                play(buffer, tickets, version, "actor-1")
            assert all(version - t.oldest_version <= bound for t in reply.trajectories)
            buffer.finished(incarnation, version, "applied")
            buffer.published(incarnation, 0, version + 1, f"digest-{version + 1}")
        assert play(buffer, late, 0) == ["stored", "late"], "its group is dropped with the first"
        assert buffer.status()["equation"]["0"]["dropped: stale"] == 1
        assert buffer.status()["equation"]["0"]["trained"] == 2 * (bound + 2)


def test_with_the_bound_0_the_learner_waits_for_the_last_trajectory() -> None:
    with opened(max_staleness=0) as buffer:
        incarnation = learner(buffer)
        *most, last = buffer.tickets("actor-0", (0, 0), 100, [], 0.0).tickets
        play(buffer, most, 0)
        assert buffer.batch(incarnation, 0, 0, 1, 0.0).state == "waiting"
        assert buffer.tickets("actor-1", (0, 0), 1, [], 0.0).tickets == []
        play(buffer, [last], 0)
        assert buffer.batch(incarnation, 0, 0, 1, 0.0).state == "ready"
        buffer.finished(incarnation, 0, "applied")
        assert buffer.tickets("actor-1", (0, 0), 1, [], 0.0).tickets == [], "no weights of version 1 are published"


def test_a_request_that_would_be_held_lets_virtual_time_pass() -> None:
    clock = VirtualClock()
    with opened(clock=clock, lease_s=30.0) as buffer:
        incarnation = learner(buffer)
        reply = buffer.batch(incarnation, 0, 0, 1, 5.0)
        assert (reply.state, clock.now) == ("waiting", 5.0)
        assert reply.why.startswith("0 of 2 groups are complete")
        tickets = buffer.tickets("actor-0", (0, 0), 100, [], 5.0).tickets
        assert clock.now == 5.0, "there were some at once"
        assert "admission" in buffer.tickets("actor-1", (0, 0), 1, [], 7.0).why
        assert clock.now == 12.0
        leases = [(ticket.id, ticket.attempt) for ticket in tickets]
        assert buffer.renew("actor-0", leases) == []
        clock.advance(31.0)
        assert buffer.renew("actor-0", leases) == leases, "they have lapsed"
        assert [t.attempt for t in buffer.tickets("actor-1", (0, 0), 2, [], 0.0).tickets] == [1, 1]


def test_refusals_are_those_of_the_process(tmp_path: Path) -> None:
    with opened() as buffer:
        incarnation = learner(buffer)
        (ticket,) = buffer.tickets("actor-0", (0, 0), 1, [], 0.0).tickets
        for ask, code in (
            (lambda: buffer.put(trajectory(ticket, attempt=0, stop_reason="aborted")), "bad_trajectory"),
            (lambda: buffer.batch(incarnation + 1, 0, 0, 1, 0.0), "stale_incarnation"),
            (lambda: buffer.tickets("a", (0, 0), -1, [], 0.0), "malformed"),
            (lambda: buffer.checkpointed(incarnation, 0, 0, str(tmp_path)), "bad_checkpoint"),
        ):
            with pytest.raises(BufferRefused) as refused:
                ask()
            assert refused.value.code == code


def test_a_folder_keeps_the_ledger_and_its_checkpoint_restores_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-0"
    checkpoint.mkdir(parents=True)
    with InProcessBuffer(rules(), FakeSource(), folder=tmp_path / "a", checkpoints=checkpoint.parent) as buffer:
        incarnation = learner(buffer)
        play(buffer, buffer.tickets("actor-0", (0, 0), 2, [], 0.0).tickets, 0)
        buffer.checkpointed(incarnation, 0, 0, str(checkpoint))
    assert (checkpoint / "buffer" / "ledger.sqlite").is_file()
    with opened(tmp_path / "a") as buffer:
        assert buffer.status()["equation"]["0"] == {"issued": 1, "waiting": 1}
        with pytest.raises(BufferRefused, match="fenced off"):
            buffer.batch(incarnation + 1, 0, 0, 1, 0.0)
        buffer.core.batches.restored = "a checkpoint"
        with pytest.raises(LedgerRestored):
            buffer.batch(incarnation, 0, 0, 1, 0.0)


def test_it_is_made_from_a_config_and_has_the_methods_of_the_client() -> None:
    with InProcessBuffer.of(Config.model_validate({"buffer": {"capacity": 512}})) as buffer:
        learner(buffer)
        assert buffer.tickets("actor-0", (0, 0), 1, [], 0.0).tickets[0].task["id"]
    public = {name for name in dir(BufferClient) if not name.startswith("_")} - {"address", "identity"}
    assert {name for name in public if not hasattr(InProcessBuffer, name)} == set()
