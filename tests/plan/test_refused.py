"""A probe evaluates nothing, whatever the configuration says of evaluations; a plan needs groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.dispatch import main
from asyncrl.config import Config
from asyncrl.config.held_out import every_set
from asyncrl.plan.probe import probed_config
from asyncrl.run_folder import RunFolder

SETS = {"a": {"tasks": 4}, "b": {"tasks": 4}}
SFT = ("--learner.loss", "sft", "--data.demonstrations", "chats.jsonl", "--actors.count", "0", "--eval.tasks", "0")


@pytest.mark.parametrize(
    "evaluations",
    [
        {"tasks": 16, "every": 5, "stop_at": {"held_out": 0.9}},
        {"tasks": 16, "every": 5, "patience": {"held_out": 3}},
        {"tasks": 16, "every": 5, "keep_best": "held_out"},
        {"every": 5, "sets": SETS, "keep_best": "a", "final": "b"},
        {"every": 5, "sets": SETS, "stop_at": {"a": 0.5}},
    ],
)
def test_a_probe_plays_no_evaluation(evaluations: dict[str, Any]) -> None:
    config = Config.model_validate({"eval": evaluations, "actors": {"count": 3, "eval": 1}})
    probed = probed_config(config, "probe")
    assert every_set(probed) == ()
    assert (probed.eval.every, probed.actors.eval, probed.actors.count) == (0, 0, 3)
    assert (probed.launch.name, probed.buffer.keep) == ("probe", "all")


def test_demonstrations_alone_are_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config.load("quickstart", {
        "learner.loss": "sft", "data.demonstrations": ["chats.jsonl"], "actors.count": 0, "eval.tasks": 0,
    })  # fmt: skip
    run = RunFolder.create(tmp_path / "run", config)
    try:
        for words in ((str(run.path),), ("--config", "quickstart", "--probe", "1", *SFT)):
            with pytest.raises(SystemExit) as ended:
                main(["plan", *words])
            out, err = capsys.readouterr()
            assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
            assert "learner.loss is sft" in err
            assert "plan needs a run with groups" in err
    finally:
        run.remove_temporary()
