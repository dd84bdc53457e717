"""The quickstart under faults, as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.chaos.command import chaos
from asyncrl.chaos.plan import KINDS
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.processes import of_run
from asyncrl.run_folder import RunFolder

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def words(tmp_path: Path, **values: object) -> list[str]:
    flags = {
        "config": QUICKSTART,
        "launch.runs-dir": tmp_path,
        "launch.name": "run",
        "buffer.lease-s": 5,
        **{name.replace("__", "."): value for name, value in values.items()},
    }
    return ["chaos", *(str(word) for name, value in flags.items() for word in (f"--{name}", value))]


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_minute_of_faults(tmp_path: Path) -> None:
    size = {"learner.steps": 60, "learner.groups-per-step": 4, "learner.group-size": 4}
    command = words(
        tmp_path,
        **size,
        **{
            "actors.count": 1,
            "actors.slots": 16,
            "buffer.capacity": 64,
            "eval.tasks": 0,
            "learner.checkpoint-every": 5,
        },
    )
    # Of every kind that needs no root one, in the order of this seed, those that pass within 2 s.
    kinds = "actor,learner,buffer,stop,node,env,net" + (",clock" if shutil.which("cc") else "")
    command += ["--kill", kinds, "--every", "3.5", "--for", "30", "--seed", "366", "--within", "200"]
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    run = RunFolder(tmp_path / "run")
    said = json.loads((run.path / "chaos.json").read_text())
    assert (ended.value.code, said["broken"]) == (0, [])
    assert said["planned"] == 8
    assert len(said["injected"]) >= 4
    assert any("lost with its host" in fault for fault in said["injected"])
    assert of_run(run.id) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_minutes_of_faults(tmp_path: Path) -> None:
    # More steps than two fast cores make in the ten minutes.
    command = words(tmp_path, **{"learner.steps": 600, "learner.checkpoint-every": 5})
    command += ["--every", "18", "--for", "600", "--seed", os.environ.get("ASYNCRL_CHAOS_SEED", "0")]
    command += [
        "--kill",
        ",".join(k for k in KINDS if k != "scorer" and (os.geteuid() == 0 or not k.startswith("disk"))),
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--within", "2400"])
    said = json.loads((tmp_path / "run" / "chaos.json").read_text())
    assert (ended.value.code, said["broken"]) == (0, [])
    assert len(said["injected"]) >= 30


def small(tmp_path: Path, **values: object) -> Config:
    fields = {
        "launch.runs_dir": str(tmp_path), "launch.name": "run", "eval.tasks": 0, "learner.steps": 1000,
        "learner.groups_per_step": 4, "learner.group_size": 4, "actors.count": 1, "actors.slots": 16,
    }  # fmt: skip
    return Config.load(QUICKSTART, fields | {name.replace("__", "."): value for name, value in values.items()})


@pytest.mark.system
def test_a_run_that_fails_is_told_with_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    never_ready = small(tmp_path, launch__start_s=0.2)
    code = chaos(
        never_ready, kill=["actor"], every_s=1, for_s=1, seed=11, within_s=60.0, undisturbed=None, compare=False
    )
    assert code == 1
    assert "BROKEN with --seed 11: no first training step: the launcher ended" in capsys.readouterr().out
    assert of_run(RunFolder(tmp_path / "run").id) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_does_not_end_is_told_with_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endless = small(tmp_path)
    code = chaos(endless, kill=["actor"], every_s=1, for_s=1, seed=11, within_s=60.0, undisturbed=None, compare=False)
    assert code == 1
    assert "BROKEN with --seed 11: it did not end within" in capsys.readouterr().out
    assert of_run(RunFolder(tmp_path / "run").id) == []


def test_a_run_that_tells_nothing_is_no_undisturbed_one(tmp_path: Path) -> None:
    other = RunFolder.create(tmp_path / "other", Config())
    for summary in (None, '{"outcome": "interrupted", "held_out_success_end": null}'):
        if summary is not None:
            other.summary.write_text(summary)
        with pytest.raises(ConfigError, match=r"--undisturbed is .*other"):
            chaos(
                small(tmp_path, eval__tasks=2, launch__start_s=0.2), kill=["actor"], every_s=1, for_s=1, seed=0,
                within_s=5, undisturbed=other.path,
            )  # fmt: skip
    other.remove_temporary()
    assert not (tmp_path / "run").exists()


def test_only_processes_of_this_host_are_reached(tmp_path: Path) -> None:
    config = Config.load(QUICKSTART, {"launch.backend": "ray", "launch.host": "auto", "weights.channel": "zmq"})
    with pytest.raises(ConfigError, match=r"launch\.backend"):
        chaos(config, kill=["actor"], every_s=1, for_s=1, seed=0, within_s=1, undisturbed=None)
