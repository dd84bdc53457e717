import doctest
import io
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.tracking.state import Event, RunState
from asyncrl.tracking.terminal import live as module
from asyncrl.tracking.terminal import view as view_module
from asyncrl.tracking.terminal.live import Terminal, end, line, render, sparkline
from asyncrl.tracking.terminal.view import view
from tests.tracking.fake_run import fake_run, message, metrics, played


def shown(renderable, width=110):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


@pytest.fixture
def run_state():
    run_state = RunState(0.0, 120, 2)
    played(run_state, list(fake_run(60))[:-1])
    return run_state


def test_the_live_view_shows_what_the_issue_asks_for(run_state):
    now = run_state.last["wall_s"]
    run_state.take(message("learner", now, "waiting", pid=100, cause="batch", on="3 groups in flight", since=now - 2))
    text = shown(render(view(run_state, "quick", now)))
    for part in (
        "quick", "step 60 / 120", "left", "reward 0.9", "held-out @0", "31.0% sampled, 42.0% greedy", "tokens/s",
        "0.82 mean, 2 max", "bound 2", "50%", "buffer", "14 in flight", "6 stale", "actor-0", "ticket 5%",
        "waits for batch 2.0 s (3 groups",
    ):  # fmt: skip
        assert part in " ".join(text.split()), part


@pytest.mark.parametrize("width", [80, 110, 200])
def test_the_live_view_keeps_to_the_width(run_state, width):
    text = shown(render(view(run_state, "quick", 90.0)), width)
    assert max(map(len, text.splitlines())) <= width


def test_before_the_first_message_there_is_something_to_see():
    assert "starting the processes" in shown(render(view(RunState(0.0, 10, 2), "quick", 1.0)))


def test_a_plain_line_says_the_same_in_one_line(run_state):
    text = line(view(run_state, "quick", run_state.last["wall_s"]), run_state.last)
    assert "\n" not in text
    for part in ("step 60/120", "reward 0.9", "staleness 0.82 max 2", "learner/batch", "generated", "left 01:1"):
        assert part in text, part


def test_a_series_that_is_missing_is_left_out_and_not_shown_as_0():
    run_state = RunState(0.0, 120, 2)
    played(run_state, [metrics("learner", 5.0, {"weights/loss": 0.1, "reward/mean": 0.5}, step=1)])
    seen = view(run_state, "quick", 6.0)
    assert line(seen, run_state.last) == "step 1/120  reward 0.500"
    assert not [row for row in shown(render(seen)).splitlines() if "tokens/s" in row and "0" in row]


def test_output_that_is_no_terminal_gets_lines_and_the_end_with_the_run_folder(run_state):
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=100), run_state, Path("runs/quick"))
    terminal.refresh(1.0)
    terminal.record(run_state.last)
    terminal.record(run_state.held_out[0])
    terminal.event(Event("restart", "actor-0", 1.0, {"why": "killed [by] SIGKILL"}))
    terminal.event(Event("published", "learner", 1.0, {"version": 3}))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1] == "step 0/120  held-out success 31.0% sampled, 42.0% greedy"
    assert lines[2] == "restart: actor-0 why=killed [by] SIGKILL"
    terminal.close(SUMMARY)
    assert "runs/quick" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_the_live_view_and_then_the_end(run_state):
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=100, force_terminal=True), run_state, Path("runs/quick"))
    terminal.refresh(90.0)
    terminal.close(SUMMARY)
    assert "held-out @0" in out.getvalue()
    assert "31.0%" in out.getvalue()


SUMMARY = {
    "held_out_success_start": 0.31, "held_out_success_end": None, "wall_s": 93.2, "steps": 60,
    "max_staleness_seen": 2, "tokens_generated": 396100, "tokens_trained": 390000, "tokens_generated_per_s": 4200.0,
    "tokens_trained_per_s": 4100.0, "restarts": {"actor-0": 1},
}  # fmt: skip


def test_a_run_without_evaluation_ends_too():
    text = shown(end(SUMMARY | {"held_out_success_start": None}, Path("runs/x")))
    assert "held-out" not in text
    assert "largest staleness" in text


def test_a_run_that_failed_says_why():
    text = shown(end(SUMMARY | {"outcome": "failed", "why": "actor-0 died [/bold] too often"}, Path("runs/x")))
    assert "asyncrl · failed" in text
    assert "actor-0 died [/bold] too often" in text


def test_a_sparkline_of_anything_has_at_most_its_width():
    assert sparkline([], 10) == ""
    assert sparkline([0.5], 10) == "▁"
    assert len(sparkline(list(range(1000)), 24)) == 24


def test_docstrings():
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(view_module).failed == 0
