"""Where a run begins, and what is checked before anything of it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.api import launch, prepare
from asyncrl.launch.origins import Origin
from asyncrl.launch.supervision.supervision import Outcome
from asyncrl.learner.checkpoints.checkpoints import Checkpoints, State
from asyncrl.run_folder import RunFolder


def config(folder: Path, **launch: object) -> Config:
    return Config.model_validate({"launch": {"runs_dir": str(folder), **launch}, "eval": {"tasks": 0}})


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run", config(tmp_path, name="run"))
    run.acks.joinpath("actor-0.jsonl").write_text("{}\n")
    Checkpoints(run.checkpoints, 2).write(State(2, 2, 0, 1), [], lambda _: lambda: None, lambda _: None)
    return run


def test_what_is_prepared_leaves_nothing(tmp_path: Path) -> None:
    prepared = prepare(config(tmp_path), stem="mine")
    assert (prepared.stem, prepared.checkpoint, list(tmp_path.iterdir())) == ("mine", None, [])


def test_data_are_opened_only_where_the_checks_include_them(tmp_path: Path) -> None:
    values = config(tmp_path).model_dump(mode="json")
    values["data"] |= {"source": "json_lines", "options": {"path": str(tmp_path / "none.jsonl")}}
    missing = Config.model_validate(values)
    prepare(missing, checks="names")
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        prepare(missing)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resume": Path("a"), "fork": Path("b")}, "--resume and --fork cannot go together"),
        ({"fresh": True}, "--fresh goes with --resume RUN"),
        ({"resume": Path("a"), "at_step": 3}, "--at-step goes with"),
    ],
)
def test_an_origin_that_contradicts_itself_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Origin(**fields)  # type: ignore[arg-type]


def test_a_run_is_resumed_in_its_folder_with_its_config(tmp_path: Path, run: RunFolder) -> None:
    origin = Origin(resume=run.path)
    sourced = origin.load(None, {"learner.steps": 7})
    assert (sourced.config.learner.steps, sourced.config.launch.name) == (7, "run")
    assert origin.check(sourced.config) is None
    assert origin.open(sourced.config, "other", None) == run
    with pytest.raises(RunError, match="holds no run"):
        Origin(resume=tmp_path / "none").load(None, {})
    with pytest.raises(ConfigError, match="--config cannot go with"):
        origin.load(tmp_path / "c.yaml", {})


def test_a_fork_has_a_folder_and_a_name_of_its_own(run: RunFolder) -> None:
    origin = Origin(fork=run.path)
    changed = origin.load(None, {}).config
    checkpoint = origin.check(changed)
    assert changed.launch.name is None
    assert checkpoint is not None
    forked = origin.open(changed, "unused", checkpoint)
    assert forked.path != run.path
    assert forked.name.startswith("run-")
    assert (forked.checkpoints / checkpoint.name).is_dir()
    assert not (forked.acks / "actor-0.jsonl").exists(), "it acknowledges nothing that the checkpoint holds"
    with pytest.raises(ConfigError, match=r"learner\.group_size cannot change with --fork"):
        origin.check(origin.load(None, {"learner.group_size": 4}).config)


def test_a_fork_needs_another_folder_for_its_ledger(tmp_path: Path) -> None:
    values = config(tmp_path, name="run").model_dump(mode="json")
    values["buffer"]["dir"] = str(tmp_path / "ledger")
    run = RunFolder.create(tmp_path / "run", Config.model_validate(values))
    Checkpoints(run.checkpoints, 2).write(State(2, 2, 0, 1), [], lambda _: lambda: None, lambda _: None)
    origin = Origin(fork=run.path)
    with pytest.raises(ConfigError, match="which holds the ledger of"):
        origin.check(origin.load(None, {}).config)
    assert origin.check(origin.load(None, {"buffer.dir": str(tmp_path / "own")}).config) is not None


def test_what_redone_steps_depend_on_is_named_when_a_run_is_resumed(run: RunFolder) -> None:
    origin = Origin(resume=run.path)
    (said,) = origin.warnings(origin.load(None, {"learner.lr": 0.5, "buffer.capacity": 4096}).config)
    assert said.startswith("learner.lr was 1e-06 and is 0.5. ")
    assert "step-000002" in said
    assert origin.warnings(origin.load(None, {"buffer.capacity": 4096}).config) == []
    fresh = Origin(resume=run.path, fresh=True)
    assert fresh.warnings(fresh.load(None, {"learner.lr": 0.5}).config) == [], "a branch begins in any case"


@pytest.mark.parametrize(
    "flags",
    [
        {"learner.lora.lora_alpha": 4.0},
        {"learner.backend": "fsdp2"},
        {"learner.greedy_baseline": True, "learner.advantage": "remax"},
    ],
)
def test_what_the_checkpoints_were_made_with_cannot_change(run: RunFolder, flags: dict[str, object]) -> None:
    for origin in (Origin(resume=run.path), Origin(fork=run.path)):
        with pytest.raises(ConfigError, match=rf"{next(iter(flags))} cannot change"):
            origin.check(origin.load(None, flags).config)


@pytest.mark.parametrize("began_with", ["sft", "decoupled_ppo"])
@pytest.mark.parametrize("option", ["resume", "fork"])
def test_a_run_does_not_change_between_demonstrations_alone_and_groups(
    tmp_path: Path, began_with: str, option: str
) -> None:
    sft: dict[str, object] = {"learner.loss": "sft", "actors.count": 0, "eval.tasks": 0}
    groups: dict[str, object] = {"learner.loss": "decoupled_ppo", "actors.count": 1, "eval.tasks": 0}
    first, then = (sft, groups) if began_with == "sft" else (groups, sft)
    shared = {"launch.runs_dir": str(tmp_path), "launch.name": "run", "data.demonstrations": ["chats.jsonl"]}
    run = RunFolder.create(tmp_path / "run", Config.load("quickstart", shared | first))
    Checkpoints(run.checkpoints, 2).write(State(2, 2, 0, 1), [], lambda _: lambda: None, lambda _: None)
    origin = Origin(**{option: run.path})
    try:
        with pytest.raises(ConfigError, match=rf"learner\.loss cannot change .* with --{option}.*--model\.path RUN"):
            origin.check(origin.load(None, then).config)
        origin.check(origin.load(None, {"learner.lr": 0.5} if first is sft else {"learner.loss": "gspo"}).config)
    finally:
        run.remove_temporary()


def test_a_fresh_start_that_was_cut_off_is_carried_out_by_the_next_one(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--fresh` is not known to the ledger until a learner has started: the run folder remembers it."""
    monkeypatch.setattr("asyncrl.launch.loop.Launcher.supervise", lambda _: Outcome("failed", 1, "killed"))
    Checkpoints(run.checkpoints, 3).write(State(4, 4, 0, 1), [], lambda _: lambda: None, lambda _: None)
    fresh = Origin(resume=run.path, fresh=True, at_step=2)
    launch(prepare(fresh.load(None, {"learner.lr": 0.5}).config, fresh, checks="names"))
    run.note(processes={})  # this process was the launcher
    assert run.fresh_from() == run.checkpoints / "step-000002"

    plain = Origin(resume=run.path)
    prepared = prepare(plain.load(None, {}).config, plain, checks="names")
    assert prepared.checkpoint == run.checkpoints / "step-000002"
    assert "began the new branch at step-000002: it begins now" in prepared.warnings[0]
    launch(prepared)
    run.note(processes={})
    assert run.fresh_from() is not None, "until a learner has begun it"
    other = Origin(resume=run.path, fresh=True)
    launch(prepare(other.load(None, {}).config, other, checks="names"))
    assert run.fresh_from() == run.checkpoints / "step-000004", "the latest word counts"

    run.remove_temporary()
    run.fresh.unlink()
    assert plain.check(run.load_config()) is None
    run.fresh.write_text("step-000009")
    with pytest.raises(RunError, match=r"step-000009, which is no checkpoint"):
        plain.check(run.load_config())


def test_a_fork_that_was_cut_off_is_not_taken_for_a_new_run(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    origin = Origin(fork=run.path)
    config = origin.load(None, {"launch.name": "forked"}).config
    checkpoint = origin.check(config)
    monkeypatch.setattr("asyncrl.launch.origins.shutil.copytree", killed)
    with pytest.raises(KeyboardInterrupt):
        origin.open(config, "unused", checkpoint)
    forked = Origin(resume=run.path.with_name("forked"))
    with pytest.raises(RunError, match=r"--fork that was killed while it copied"):
        forked.check(forked.load(None, {}).config)
