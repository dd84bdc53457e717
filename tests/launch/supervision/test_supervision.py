from __future__ import annotations

import pytest

from asyncrl.launch.supervision.supervision import Outcome, RestartBudget, after_exit
from asyncrl.process.logs import STOPPED


def test_a_restart_counts_for_its_window_only() -> None:
    budget = RestartBudget(restarts=1, window_s=10.0)
    assert [budget.take(t) for t in (0.0, 5.0, 9.9, 10.1, 11.0)] == [True, False, False, True, False]


def test_no_budget_means_no_restart() -> None:
    assert not RestartBudget(restarts=0, window_s=10.0).take(0.0)


def test_only_the_learner_finishes_a_run() -> None:
    budget = RestartBudget(restarts=1, window_s=10.0)
    assert after_exit("learner", 0, "", budget, 0.0) == Outcome("finished", 0)
    assert after_exit("actor-0", 0, "exit code 0", budget, 0.0) is None


def test_a_learner_that_was_stopped_by_another_than_the_launcher_is_started_again_within_the_budget() -> None:
    budget = RestartBudget(restarts=1, window_s=10.0)
    assert after_exit("learner", STOPPED, "told to stop", budget, 0.0) is None
    outcome = after_exit("learner", STOPPED, "told to stop", budget, 1.0)
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code) == ("failed", 1)


@pytest.mark.parametrize(("code", "exit_code"), [(2, 2), (3, 1)])
def test_errors_that_a_restart_would_repeat_end_the_run_and_cost_no_budget(code: int, exit_code: int) -> None:
    budget = RestartBudget(restarts=1, window_s=10.0)
    outcome = after_exit("buffer", code, "buffer.dir is on a network filesystem.", budget, 0.0)
    assert outcome is not None
    assert (outcome.exit_code, "buffer.dir" in outcome.why) == (exit_code, True)
    assert budget.take(0.0)


def test_past_the_budget_the_last_death_is_told() -> None:
    budget = RestartBudget(restarts=1, window_s=10.0)
    assert after_exit("actor-1", -9, "killed by SIGKILL", budget, 0.0) is None
    outcome = after_exit("actor-1", -11, "killed by SIGSEGV", budget, 1.0)
    assert outcome is not None
    assert outcome.exit_code == 1
    assert "actor-1" in outcome.why
    assert "SIGSEGV" in outcome.why
    assert "launch.restarts" in outcome.why
