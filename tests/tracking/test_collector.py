import io
import json
import sys
import time
from pathlib import Path
from typing import ClassVar

import msgpack
import pytest
import zmq
from rich.console import Console

from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.tracking import collector as collector_module
from asyncrl.tracking.collector import Collector
from asyncrl.tracking.report import report
from asyncrl.tracking.reporter import Reporter
from asyncrl.tracking.sinks import jsonl
from tests.tracking.fake_run import fake_run


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(collector_module, "write_report", lambda run, hurry, notes: run.report.touch())
    made = []

    def collector(sinks=("jsonl",), run=None, **options):
        config = Config.model_validate({"tracking": {"sinks": sinks}, "learner": {"steps": 20}})
        run = run or RunFolder.create(tmp_path / "runs" / "r", config)
        made.append((Collector(run, config, **options), run))
        return made[-1]

    yield collector
    for each, _ in made:
        each._socket.close(0)


def send(run, messages):
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(str(run.address("launcher")))
    for m in messages:
        socket.send(m if isinstance(m, bytes) else msgpack.packb(m))
    socket.close(5000)


def polled(collector, until):
    events, deadline = [], time.monotonic() + 60
    while not until(events):
        assert time.monotonic() < deadline, [e.kind for e in events]
        events += collector.poll(0.05)
    return events


def test_reports_of_the_roles_become_one_record_per_step(make):
    collector, run = make()
    collector.state.started = 0.0
    send(run, fake_run(20))
    events = polled(collector, lambda es: sum(e.kind == "step" for e in es) == 22)
    assert collector.ready == {"learner", "buffer", "actor-0", "actor-1"}
    assert [e.role for e in events if e.kind == "ready"] == ["learner", "buffer", "actor-0", "actor-1"]
    collector.close()
    records = list(jsonl.read(run.metrics))
    assert [r["step"] for r in records] == [0, *range(1, 21), 20]
    assert records[5]["tokens"] == 5 * 6500
    lines = [json.loads(x) for x in (run.path / "events.jsonl").read_text().splitlines()]
    assert sum(x["kind"] == "published" for x in lines) == 20


def test_the_summary_holds_what_summary_json_needs(make):
    collector, run = make()
    send(run, fake_run(20, start=collector.state.started))
    polled(collector, lambda es: sum(e.kind == "step" for e in es) == 22)
    collector.restarted("actor-0", "killed by SIGKILL")
    summary = json.loads(json.dumps(collector.summary()))
    assert (summary["held_out_success_start"], summary["held_out_success_end"]) == (0.31, 0.93)
    assert (summary["steps"], summary["max_staleness_seen"]) == (20, 2)
    assert summary["tokens_trained"] == 130_000
    assert summary["restarts"] == {"actor-0": 1}
    assert summary["waits_s"]["learner"]["evaluation"] == 4.8
    assert {"asyncrl", "torch", "transformers", "python"} <= set(summary["versions"])
    collector.close()


def test_one_evaluation_has_no_end(make):
    collector, run = make()
    send(run, list(fake_run(3))[:-1])
    polled(collector, lambda es: sum(e.kind == "step" for e in es) == 4)
    summary = collector.summary()
    assert (summary["held_out_success_start"], summary["held_out_success_end"]) == (0.31, None)


def test_real_reporters_are_heard_and_what_they_wait_for_is_known(make):
    collector, run = make()
    reporter = Reporter(run.address("launcher"), "actor-0", strict=True)
    reporter.ready()
    reporter.waiting("ticket", on="buffer: admission is closed")
    polled(collector, lambda es: len(es) == 2)
    assert collector.ready == {"actor-0"}
    waiting = collector.waiting["actor-0"]
    assert (waiting.cause, waiting.on) == ("ticket", "buffer: admission is closed")
    assert 0 <= waiting.for_s < 10
    collector.exited("actor-0")
    assert collector.ready == frozenset()
    reporter.close()


def test_garbage_is_refused_and_counted(make, caplog):
    collector, run = make()
    send(run, [b"\xc1", b"", msgpack.packb([1]), msgpack.packb({"role": "x"}), *list(fake_run(1))[:1]])
    polled(collector, lambda es: len(es) == 1)
    assert collector.malformed == 4
    assert sum("malformed" in r.message for r in caplog.records) == 1


def test_poll_returns_in_time_when_nobody_speaks(make):
    collector, _ = make()
    begun = time.monotonic()
    assert collector.poll(0.1) == []
    assert 0.05 < time.monotonic() - begun < 30.0


class FailingSink:
    def __init__(self, run, config):
        self.seen = 0

    def record(self, record):
        self.seen += 1
        if self.seen == 3:
            raise RuntimeError("the tracker's server is gone")

    def event(self, event):
        pass

    def close(self, summary):
        raise AssertionError("a dropped sink is not asked again")


class SlowSink(FailingSink):
    def __init__(self, run, config):
        time.sleep(0.5)
        raise OSError("no such host")


@pytest.mark.parametrize("sink", ["FailingSink", "SlowSink", "missing"])
def test_a_failing_slow_or_missing_sink_never_ends_a_run(make, caplog, sink):
    name = "no_such_module:Sink" if sink == "missing" else f"{Path(__file__)}:{sink}"
    collector, run = make(sinks=("jsonl", name))
    begun = time.monotonic()
    send(run, fake_run(20))
    polled(collector, lambda es: sum(e.kind == "step" for e in es) == 22)
    (dropped,) = collector._sinks
    collector.close()
    assert time.monotonic() - begun < 25, "less than a sink that hangs is waited for"
    assert len(list(jsonl.read(run.metrics))) == 22
    warned = [r.message for r in caplog.records if "dropped for the rest of the run" in r.message]
    assert len(warned) == 1
    assert dropped.failures == 1


class RememberingSink:
    made: ClassVar[list] = []

    def __init__(self, run, config):
        self.seen = []
        self.made.append(self)

    def record(self, record):
        self.seen.append(record["step"])

    def event(self, event):
        self.seen.append(event.kind)

    def close(self, summary):
        self.seen.append(("closed", summary["steps"]))


def test_a_sink_of_ones_own_sees_everything_in_order_and_is_closed_once(make):
    collector, run = make(sinks=("jsonl", f"{Path(__file__)}:RememberingSink"))
    send(run, list(fake_run(2))[-5:])
    polled(collector, lambda es: len(es) == 3)
    collector.finish()
    collector.close()
    (made,) = _remembered()
    assert made.seen == ["published", 2, 2, ("closed", 2)]


def _remembered():
    """The file is loaded a second time, as a user's own module."""
    (module,) = [m for name, m in sys.modules.items() if name.startswith("asyncrl_plugin_test_collector")]
    return module.RememberingSink.made


def test_a_resumed_run_appends(make):
    collector, run = make()
    send(run, list(fake_run(5))[:-1])
    polled(collector, lambda es: sum(e.kind == "step" for e in es) == 6)
    collector.close()
    again, _ = make(run=run)
    assert again.state.step == 5
    send(run, [m for m in fake_run(6) if m["kind"] == "metrics"][-2:])
    polled(again, lambda es: len(es) == 2)
    again.close()
    assert [r["step"] for r in jsonl.read(run.metrics)] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert again.summary()["held_out_success_start"] == 0.31


def test_a_finished_run_that_is_resumed_keeps_its_totals(make):
    collector, run = make()
    send(run, list(fake_run(5))[:-1])
    polled(collector, lambda es: sum(e.kind == "step" for e in es) == 6)
    collector.close()
    first = collector.summary()
    assert first["tokens_trained"] > 0
    again, _ = make(run=run)  # nothing is trained in it
    again.close()
    assert again.summary()["tokens_trained"] == first["tokens_trained"]
    assert again.summary()["tokens_generated"] >= first["tokens_generated"] > 0


def test_a_report_that_cannot_be_made_does_not_end_the_run(make, caplog, monkeypatch):
    collector, run = make()
    monkeypatch.setattr(collector_module, "write_report", report.write_report)
    run.metrics.write_text("no json\n{}\n")
    collector.close()
    assert any("no report" in r.message for r in caplog.records)


def test_output_goes_to_the_console(make):
    out = io.StringIO()
    collector, run = make(console=Console(file=out, width=100))
    send(run, fake_run(2))
    polled(collector, lambda es: sum(e.kind == "step" for e in es) == 4)
    collector.close()
    assert "step 2/20" in out.getvalue()
    assert str(run.path.name) in out.getvalue()
    assert run.report.exists()


def test_a_result_that_a_new_learner_tells_again_is_written_once(make):
    collector, run = make()

    def tell(collector, pid):
        reporter = Reporter(run.address("launcher"), "learner", strict=True)
        reporter.event("eval", set="dev", step=10, branch=0, sampled=0.5)
        reporter.event("eval_failed", set="dev", step=10, branch=0, why="2 episodes failed in their environment")
        reporter.event("eval", set="dev", step=20 + pid, branch=0, sampled=0.75)
        polled(collector, lambda es: len(es) == 3)
        reporter.close()

    tell(collector, 0)
    tell(collector, 0)
    collector.close()
    again, _ = make(run=run)
    tell(again, 1)
    again.close()
    lines = [json.loads(x) for x in (run.path / "events.jsonl").read_text().splitlines()]
    assert [(x["kind"], x["step"]) for x in lines] == [("eval", 10), ("eval_failed", 10), ("eval", 20), ("eval", 21)]
