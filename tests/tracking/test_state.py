import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.tracking.series import AXES, check
from asyncrl.tracking.state import RunState
from asyncrl.tracking.terminal.view import view
from tests.tracking.fake_run import fake_run, message, metrics, played

GENERATED = "throughput/tokens_generated"
TRAINED = "throughput/tokens_trained"


def test_a_record_per_training_step_and_per_evaluation_with_known_names():
    run_state = RunState(0.0, 20, 2)
    records = played(run_state, fake_run(20))
    assert [r["step"] for r in records] == [0, *range(1, 21), 20]
    for record in records:
        check(set(record) - set(AXES))
    assert records[10]["tokens"] == 6500 * 10
    assert records[10][GENERATED] == pytest.approx(2 * 33000, rel=0.01)
    assert records[10]["throughput/tokens_trained_per_s"] == pytest.approx(
        6500 / (records[10]["wall_s"] - records[9]["wall_s"])
    )
    assert records[1]["throughput/tokens_trained_per_s"] == pytest.approx(
        6500 / (records[1]["wall_s"] - records[0]["wall_s"])
    )
    assert len(run_state.held_out) == 2
    assert run_state.max_staleness_seen == 2


def test_what_came_with_a_step_is_not_in_the_next_record():
    run_state = RunState(0.0, 20, 2)
    run_state.take(metrics("learner", 1.0, {"reward/mean": 0.5}, step=1))
    assert run_state.record(1, 1.0)["reward/mean"] == 0.5
    run_state.take(metrics("learner", 2.0, {"weights/lr": 1.0}, step=2))
    assert "reward/mean" not in run_state.record(2, 2.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("throughput/requests_running", 30.0), ("weights/held_version", 15.0), ("weights/load_s", 20.0),
     ("throughput/step_s", 20.0)],
)  # fmt: skip
def test_values_of_several_roles_become_one_as_the_table_says(name, expected):
    run_state = RunState(0.0, 20, 2)
    run_state.take(metrics("actor-0", 1.0, {name: 10.0}))
    run_state.take(metrics("actor-1", 2.0, {name: 20.0}))
    assert run_state.now(3.0)[name] == expected


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=5))
def test_a_total_survives_restarts_of_its_process(starts):
    """Each start of the process counts from 0; nothing is lost, however often it starts anew."""
    run_state, t, expected = RunState(0.0, 1, 0), 0.0, 0
    for pid, increments in enumerate(starts, 1):
        count = 0
        run_state.take(metrics("actor-0", t, {GENERATED: 0.0}, pid=pid))
        for n in increments:
            t += 1
            count += n
            run_state.take(metrics("actor-0", t, {GENERATED: count}, pid=pid))
        expected += count
    assert run_state.now(t)[GENERATED] == expected


def test_a_dead_actor_keeps_its_totals_and_loses_what_it_measured():
    run_state = RunState(0.0, 20, 2)
    for actor in ("actor-0", "actor-1"):
        run_state.take(message(actor, 0.5, "ready"))
        run_state.take(metrics(actor, 1.0, {GENERATED: 100.0, "throughput/requests_running": 7.0}))
    run_state.restarted("actor-1")
    values = run_state.now(2.0)
    assert values[GENERATED] == 200
    assert values["throughput/requests_running"] == 7
    assert values["system/restarts"] == values["system/restarts/actor-1"] == 1
    assert not run_state.roles["actor-1"].ready


def test_waits_are_shares_of_the_time_since_the_last_record():
    run_state = RunState(0.0, 20, 2)
    run_state.take(message("actor-0", 0.0, "waiting", cause="ticket"))
    run_state.take(message("actor-1", 0.0, "ready"))
    run_state.take(message("learner", 6.0, "waiting", waits={}, cause="batch", on="buffer"))
    record = run_state.record(1, 10.0)
    assert record["waits/actor/ticket"] == pytest.approx(0.5), "one of two actors, all the time"
    assert record["waits/learner/batch"] == pytest.approx(0.4)
    run_state.take(message("learner", 11.0, "ready", waits={"batch": 5.0}))
    record = run_state.record(2, 20.0)
    assert record["waits/learner/batch"] == pytest.approx(0.1)


def test_an_actor_that_left_is_no_part_of_the_mean_and_the_picture():
    run_state = RunState(0.0, 20, 2)
    for role in ("actor-0", "actor-1"):
        run_state.take(message(role, 0.0, "ready"))
    run_state.take(message("actor-0", 0.0, "waiting", cause="ticket", waits={}))
    run_state.gone("actor-1")
    assert run_state.record(1, 10.0)["waits/actor/ticket"] == pytest.approx(1.0)
    assert [role.role for role in view(run_state, "run", 10.0).roles] == ["actor-0"]


def test_waiting_goes_on_from_one_start_of_a_process_to_the_next():
    run_state = RunState(0.0, 20, 2)
    run_state.take(message("learner", 10.0, "ready", pid=1, waits={"batch": 4.0}))
    run_state.take(message("learner", 20.0, "ready", pid=2, waits={}))
    run_state.take(message("learner", 30.0, "ready", pid=2, waits={"batch": 1.0}))
    assert run_state.roles["learner"].waited(30.0) == {"batch": 5.0}


def test_a_resumed_run_goes_on_with_clock_totals_and_first_evaluation():
    first = RunState(0.0, 20, 2)
    records = played(first, list(fake_run(10))[:-1])
    second = RunState(1000.0, 20, 2)
    second.resume(records)
    assert second.now(1000.0).get(GENERATED) is None
    second.take(metrics("actor-0", 1001.0, {GENERATED: 10.0}, pid=9))
    second.take(metrics("buffer", 1001.0, {"buffer/puts": records[-1]["buffer/puts"] + 5}, pid=9))
    values = second.now(1001.0)
    assert values[GENERATED] == records[-1][GENERATED] + 10
    assert values["buffer/puts"] == records[-1]["buffer/puts"] + 5, "counted from the ledger: not counted twice"
    second.take(metrics("actor-0", 1002.0, {GENERATED: 30.0}, pid=9))
    assert second.now(1002.0)[GENERATED] == records[-1][GENERATED] + 30
    assert second.record(11, 1001.0)["wall_s"] == pytest.approx(records[-1]["wall_s"] + 1)
    assert second.held_out[0]["reward/held_out_success_sampled"] == 0.31


def test_tokens_of_steps_that_are_done_again_count_once():
    def learner(run_state, step, count, pid):
        run_state.take(metrics("learner", step + 100.0 * pid, {TRAINED: count}, step=step, pid=pid))
        return run_state.record(step, step + 100.0 * pid)

    run_state = RunState(0.0, 20, 2)
    records = [learner(run_state, step, 100.0 * step, 1) for step in (1, 2, 3, 4)]
    # It died, its last checkpoint was that of step 2.
    records += [learner(run_state, 3, 110.0, 2), learner(run_state, 4, 220.0, 2), learner(run_state, 5, 330.0, 2)]
    assert [r[TRAINED] for r in records] == [100, 200, 300, 400, 310, 420, 530]
    assert [r["tokens"] for r in records] == [r[TRAINED] for r in records]
    assert records[4][f"{TRAINED}_per_s"] > 0
    again = RunState(1000.0, 20, 2)
    again.resume(records)
    # The launcher too, and the checkpoint is that of step 4.
    assert [learner(again, step, 90.0 * (step - 4), 3)[TRAINED] for step in (5, 6)] == [510, 600]


@pytest.mark.parametrize(
    "broken",
    [{}, {"kind": "metrics"}, message("x", 0.0, "gossip"), metrics("x", 0.0, {"reward/meen": 1.0}),
     metrics("x", 0.0, {"reward/mean": "high"}), message("x", 0.0, "ready", waits={"batch": "long"})],
)  # fmt: skip
def test_a_malformed_message_raises_one_of_the_documented_errors(broken):
    with pytest.raises((KeyError, TypeError, ValueError)):
        RunState(0.0, 1, 0).take(broken)


def test_an_evaluation_that_ends_behind_later_steps_is_merged_with_the_record_of_its_own():
    """Its record brings nothing of the present: clock, tokens and rates of its step stay."""
    run_state = RunState(0.0, 20, 2)
    list(played(run_state, fake_run(20)))
    before = run_state.last, run_state.step, len(run_state.recent)
    late = {
        "reward/held_out_success_sampled": 0.7,
        "reward/held_out/dev/sampled": 0.7,
        "reward/held_out/dev/seconds": 3.0,
    }
    run_state.take(metrics("learner", 99.0, late, step=10))
    assert run_state.record(10, 99.0) == {"step": 10.0} | late
    run_state.take(metrics("learner", 99.0, late, step=20))
    assert run_state.record(20, 99.0) == {"step": 20.0} | late, "also behind its own step, whose waits must stay"
    assert (run_state.last, run_state.step, len(run_state.recent)) == before
    assert view(run_state, "run", 99.0).held_out[-2:] == ((10, 0.7, None), (20, 0.7, None))
    again = RunState(0.0, 20, 2)
    again.resume([{"step": 10.0, "wall_s": 5.0, "tokens": 77.0}, {"step": 10.0} | late])
    assert again._tokens_at == {10: 77.0}
    run_state.take(metrics("learner", 100.0, {"reward/mean": 0.1}, step=9))
    assert "wall_s" in run_state.record(9, 100.0), "a step that is done again is a whole record"
