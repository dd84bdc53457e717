"""The trackers themselves, offline: what was logged is read back from what they keep on disk."""

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.series import AXES, PLACEHOLDERS, SERIES

EVERY = sorted(
    name.format(**{p: (allowed or ["some.name"])[-1] for p, allowed in PLACEHOLDERS.items()}) for name in SERIES
)
"""One series of each family, and every other series."""

OPENS_ON = {"reward", "success", "held_out_success_sampled", "held_out_success_greedy"}

LOG_ALL = """
import json, sys
from pathlib import Path
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks import GuardedSink
run = RunFolder.existing(Path(sys.argv[1]))
sink = GuardedSink(sys.argv[2], run, run.load_config())
for step in (1, 2):
    sink.record({"step": step, "wall_s": 2.5 * step, "tokens": 100.0 * step, "weights/loss": float("nan")}
                | {name: step + i / 1000 for i, name in enumerate(json.loads(sys.argv[3]))})
sink.close({"held_out_success_end": 0.93})
print("failures", sink.failures)
"""

LOG_ROLLOUTS = """
import sys
from pathlib import Path
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.rollouts.store import Store
from asyncrl.tracking.sinks import SINKS
from asyncrl.plugins import resolve
from tests.tracking.rollouts.test_store import a_rollout
run = RunFolder.existing(Path(sys.argv[1]))
sink = resolve(sys.argv[2], SINKS, "sinks")(run, run.load_config())
store = Store(run.rollouts, 1.0)
store.write([a_rollout(0, text="first words")])
sink.record({"step": 1, "reward/mean": 0.5})
store.write([a_rollout(1, text="second words"), a_rollout(1, text="more words", index=1)])
sink.close({})
"""


def opens_on(logged):
    """The charts of the section that a tracker shows first: it sorts them by name."""
    first = min(name.partition("/")[0] for name in logged if "/" in name)
    return {name.partition("/")[2] for name in logged if name.startswith(f"{first}/")}


def log_rollouts(run, sink):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_"))}
    done = subprocess.run(
        [sys.executable, "-c", LOG_ROLLOUTS, str(run.path), sink],
        capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
        env=env | {"HOME": str(run.path), "PYTHONPATH": os.getcwd(), "https_proxy": "http://127.0.0.1:9"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.system
def test_rollouts_are_tables_in_wandb(tmp_path):
    pytest.importorskip("wandb")
    run = make(tmp_path, project="p", wandb_mode="offline")
    log_rollouts(run, "wandb")
    tables = [json.loads(path.read_text()) for path in run.path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert sorted([row[0], row[-1]] for table in tables for row in table["data"]) == [
        [1, "first words"], [2, "more words"], [2, "second words"],
    ]  # fmt: skip


@pytest.mark.system
def test_rollouts_are_tables_in_trackio(tmp_path):
    pytest.importorskip("trackio")
    run = make(tmp_path, project="p")
    log_rollouts(run, "trackio")
    database = sqlite3.connect(tmp_path / "runs" / ".trackio" / "p.db")
    rows = database.execute("select step, metrics from metrics order by step").fetchall()
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    tables = {step: values["rollouts"] for step, values in logged if "rollouts" in values}
    assert {step: [row["text"] for row in table["_value"]] for step, table in tables.items()} == {
        1: ["first words"], 2: ["second words", "more words"],
    }  # fmt: skip


def log_all(run, sink, **environment):
    """In a process of its own, as in the launcher: trackers keep global state. No account, no home, no network."""
    names = [name for name in EVERY if name != "weights/loss"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_"))}
    done = subprocess.run(
        [sys.executable, "-c", LOG_ALL, str(run.path), sink, json.dumps(names)],
        capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
        env=env | {"HOME": str(run.path), "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
        | environment,
    )  # fmt: skip
    return names, done


def make(tmp_path, **tracking):
    return RunFolder.create(tmp_path / "runs" / "r", Config.model_validate({"tracking": tracking}))


def wandb_records(path: Path):
    """The protobuf records of a .wandb file: LevelDB's log format, after a header of 7 bytes.

    Blocks of 32 KiB hold chunks of checksum (4 bytes), length (2), type (1: whole, 2: first, 3: middle, 4: last).
    """
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), 7, []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


@pytest.mark.system
def test_an_offline_wandb_run_holds_every_series_and_the_axes(tmp_path):
    pytest.importorskip("wandb")
    run = make(tmp_path, project="p", wandb_mode="offline")
    names, done = log_all(run, "wandb")
    assert "failures 0" in done.stdout, done.stderr
    (file,) = run.path.glob("wandb/offline-run-*/run-*.wandb")
    history, summary, metrics = [], {}, []
    for record in wandb_records(file):
        match record.WhichOneof("record_type"):
            case "history":
                item = {("/".join(i.nested_key) or i.key): json.loads(i.value_json) for i in record.history.item}
                history.append(item)
            case "summary":
                summary |= {("/".join(i.nested_key) or i.key): i.value_json for i in record.summary.update}
            case "metric":
                metrics.append(record.metric)
            case "run":
                assert record.run.project == "p"
                assert record.run.display_name == "r"
    assert len(history) == 2
    assert set(names) | set(AXES) <= set(history[1])
    assert "weights/loss" not in history[1], "a value that is not finite is left out"
    assert history[1]["tokens"] == 200
    assert history[1][names[7]] == pytest.approx(2.007)
    assert summary["held_out_success_end"] == "0.93"
    steps = {m.glob_name: m.step_metric for m in metrics if m.glob_name}
    assert set(steps.values()) == {"step"}
    assert {g.removesuffix("/*") for g in steps} >= {s.section for s in SERIES.values()}
    assert opens_on(history[1]) == OPENS_ON


def test_wandb_online_without_an_account_is_dropped_with_a_remedy(tmp_path):
    pytest.importorskip("wandb")
    run = make(tmp_path, wandb_mode="online")
    _, done = log_all(run, "wandb")
    assert "failures 1" in done.stdout
    assert "wandb login" in done.stderr


@pytest.mark.system
def test_trackio_holds_every_series(tmp_path):
    pytest.importorskip("trackio")
    run = make(tmp_path, project="p")
    names, done = log_all(run, "trackio")
    assert done.stdout == "failures 0\n", "trackio keeps quiet: the terminal belongs to the launcher"
    database = sqlite3.connect(tmp_path / "runs" / ".trackio" / "p.db")
    rows = database.execute("select step, metrics from metrics where run_name = 'r' order by step").fetchall()
    assert [step for step, _ in rows] == [1, 2]
    logged = json.loads(rows[1][1])
    assert set(names) | {"wall_s", "tokens"} <= set(logged)
    assert all(math.isfinite(v) for v in logged.values() if isinstance(v, float))
    assert opens_on(logged) == OPENS_ON


def scalars(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_holds_every_series(tmp_path):
    pytest.importorskip("tensorboard")
    run = make(tmp_path)
    names, done = log_all(run, "tensorboard")
    assert done.stdout == "failures 0\n", done.stderr
    logged = scalars(run.path / "tensorboard")
    assert set(logged) == {*names, "wall_s", "tokens"}, "a value that is not finite is left out"
    assert logged["tokens"] == [(1, 100.0), (2, 200.0)]
    assert logged[names[7]][1] == (2, pytest.approx(2.007))


def test_steps_done_again_after_a_resume_replace_the_earlier_ones_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from asyncrl.tracking.sinks.tensorboard import TensorBoard

    run = make(tmp_path)
    for steps, reward in ((range(1, 5), 0.25), (range(3, 6), 0.5)):
        sink = TensorBoard(run, run.load_config())
        for step in steps:
            sink.record({"step": step, "reward/mean": reward})
        sink.close({})
        time.sleep(1.1)  # the name of an event file holds the second; files are read in the order of names
    assert scalars(run.path / "tensorboard")["reward/mean"] == [(1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5), (5, 0.5)]


@pytest.mark.system
def test_a_tracker_that_is_not_installed_is_named_with_the_extra(tmp_path):
    run = make(tmp_path)
    hidden = tmp_path / "hidden"
    for package in ("wandb", "trackio", "tensorboard"):
        (hidden / package).mkdir(parents=True)
        (hidden / package / "__init__.py").write_text(f"raise ModuleNotFoundError('no', name='{package}')")
        path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
        _, done = log_all(run, package, PYTHONPATH=path)
        assert "failures 1" in done.stdout
        assert f"pip install 'asyncrl[{package}]'" in done.stderr
