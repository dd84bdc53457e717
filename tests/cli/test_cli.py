"""The command as a user meets it: what it prints, where, and with which exit code."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from asyncrl import cli
from asyncrl.cli import dispatch
from asyncrl.config import Config
from asyncrl.launch.backends import preloaded
from asyncrl.launch.processes import this_process
from asyncrl.launch.supervision.supervision import Outcome
from asyncrl.learner.checkpoints.checkpoints import Checkpoints, State
from asyncrl.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
UNTRIED = ("--launch.try-reset", "false")
"""For what is refused on other grounds: the trial of `reset` is a process of a second of CPU."""


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    before = list(sys.path)
    try:
        # The imports that a launch begins with would only be thrown away: most of these launches are refused.
        with patch.object(preloaded, "early", lambda _: contextlib.nullcontext()), pytest.raises(SystemExit) as end:
            cli.main(words)
    finally:
        sys.path[:] = before
    out, err = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, out, err


def sentence(err: str) -> str:
    """What stderr says: one sentence, no traceback."""
    assert err.startswith("asyncrl: ")
    assert err.count("\n") == 1, err
    return err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_prints_every_value_with_its_source_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    flags = ["--buffer.max-staleness", "1", "--buffer.capacity", "2048"]
    code, out, _ = call(capsys, "launch", "--config", QUICKSTART, *flags, "--dry-run")
    assert code == 0
    values = yaml.safe_load(out)
    assert values["buffer"] | {"max_staleness": 1, "capacity": 2048} == values["buffer"]
    sources = [line for line in out.splitlines() if "#" in line and line[0] != "#"]
    assert {line.rpartition("# ")[2] for line in sources} == {"default", "file", "flag"}
    assert "# learner  this machine" in out
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--buffer.max-stalenes", "2"], "did you mean --buffer.max-staleness"),
        (["--buffer.capacity", "many"], "--buffer.capacity is 'many'"),
        (["--weights.every", "9"], "weights.every is 9"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--data.source", "lookupp"], "data.source: 'lookupp'"),
        (["--env.name", "no_such_module:Env"], "env.name: 'no_such_module:Env'"),
        (["--env.name", "json:NoSuchEnv"], "env.name: 'json:NoSuchEnv'"),
        (["--env.name", "broken_env.py:Env"], "broken_env.py:Env', which fails when it is imported"),
        (["--env.options", "{tool_latency: 1}"], "env.options.tool_latency"),
        (["--buffer.sampler", "freshist"], "buffer.sampler: 'freshist'"),
        (["--learner.advantage", "grpoo", "--dry-run"], "learner.advantage: 'grpoo'"),
        (["--learner.backend", "fsdp3", "--dry-run"], "learner.backend: 'fsdp3'"),
        (["--model.path", "./no/such/model"], "model.path is './no/such/model'"),
        (["--model.path", "./empty"], "config.json"),
        (["--model.path", "./untokenized"], "tokenizer"),
        (["stray"], "--config stray: there is no such file"),
        (["quickstrt"], "(did you mean quickstart?)"),
        (["none.yml"], "--config none.yml: No such file"),
        (["--dry-run", "verl.yaml"], "actor_rollout_ref in verl.yaml is not a field"),
        (["--dry-run", "a.yaml", "b.yaml"], "a configuration comes first, as in asyncrl launch a.yaml"),
        (["quickstart", "stray"], "'stray' belongs to no flag"),
        (["quickstart", "calculator"], "'calculator' belongs to no flag: a configuration comes first"),
        (["--config", "c.yaml", "--resume", "r"], "--resume"),
        # What other systems call it.
        (["--learner.learning-rate", "1e-6"], "is not a flag (here it is --learner.lr; docs/reference/other-systems"),
        (["--num_generations=8"], "(here it is --learner.group-size; "),
        (["--trainer.total-epochs", "15"], "(here it is --learner.steps; "),
        (["trainer.total_epochs=15"], "(here it is --learner.steps; "),
        (["learner.group_size=4"], "is not a flag: write --learner.group-size 4."),
        (["data.options.path=x"], "is not a flag: write --data.options.path x."),
        (["--actor-rollout-ref.rollout.n", "8"], "(another system's key; docs/reference/other-systems.md"),
        (["verl.yaml"], "actor_rollout_ref in verl.yaml is not a field (another system's key; docs/reference/other"),
        (["--learner.group-size", "1"], "learner.group_size is 1 and learner.advantage grpo compares the episodes"),
        (["--launch.gpus", "1"], "--launch.gpus is 1: expected a mapping, as in {name: value}"),
        (
            ["--model.path", "https://huggingface.co/Qwen/Qwen3-0.6B"],
            "a URL: expected the name on the hub (Qwen/Q",
        ),
        (["--model.path", "./model.gguf"], "a file: expected a Hugging Face folder"),
        (["--model.path", "./adapter"], "a folder of LoRA adapters: merge them into their base model"),
        (["--env.name", "trl.py::reward"], "'path/to/file.py:Name' with a single colon"),
        (
            ["--data.source", "json_lines", "--data.options.path", "array.json"],
            "data.source datasets reads JSON arrays",
        ),
        (["--data.source", "json_lines", "--data.options.path", "rows.csv"], "reads parquet, CSV and JSON arrays"),
        (
            ["--env.name", "single_turn", "--env.options.score", "trl.py:reward"],
            "its parameter 'completions' has no value: a score gets those of data_source, solution_str",
        ),
    ],
)
def test_a_config_error_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], here: Path, words: list[str], named: str
) -> None:
    (here / "broken_env.py").write_text("1 / 0\n")
    (here / "empty").mkdir()
    (here / "untokenized").mkdir()
    (here / "untokenized" / "config.json").write_text("{}")
    (here / "verl.yaml").write_text("actor_rollout_ref: {model: {path: x}}\n")
    (here / "model.gguf").touch()
    (here / "adapter").mkdir()
    (here / "adapter" / "adapter_config.json").write_text("{}")
    (here / "array.json").write_text('[{"prompt": "a"}]\n')
    (here / "rows.csv").write_text("prompt,ground_truth\na,1\n")
    (here / "trl.py").write_text("def reward(completions, **kwargs): return [1.0 for _ in completions]\n")
    code, out, err = call(capsys, "launch", *words)
    assert (code, out) == (2, "")
    assert named in sentence(err)
    assert not (here / "runs").exists()


def test_the_config_may_come_first_and_a_key_of_the_options_is_a_flag(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    words = ["--env.options.tool-latency-s", "0.5", "--dry-run", "--launch.try-reset", "false"]
    code, out, err = call(capsys, "launch", QUICKSTART, *words)
    assert code == 0, err
    assert yaml.safe_load(out)["env"]["options"] == {"tool_latency_s": 0.5}


def test_the_config_may_follow_flags(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "mine.yaml").write_text("learner: {groups_per_step: 7}\nlaunch: {try_reset: false}\n")
    code, out, err = call(capsys, "launch", "--dry-run", "mine.yaml", "--learner.group-size", "3")
    assert code == 0, err
    assert (yaml.safe_load(out)["learner"]["groups_per_step"], yaml.safe_load(out)["learner"]["group_size"]) == (7, 3)


def test_a_configuration_that_comes_with_asyncrl_is_named_without_its_option(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    for words in (
        ["launch", "quickstart", "--print", "slurm"],
        ["launch", "--config", "quickstart", "--print", "slurm"],
        ["launch", "--print", "slurm", "quickstart"],
    ):
        code, out, err = call(capsys, *words)
        assert (code, "groups_per_step: 24" in out) == (0, True), err


def test_without_a_config_it_says_what_it_needs(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    code, _, err = call(capsys, "launch")
    assert code == 2
    assert "asyncrl launch FILE.yaml" in sentence(err)
    assert "asyncrl launch quickstart." in " ".join(err.split())


@pytest.mark.parametrize("command", ["launch", "eval", "chaos"])
def test_the_help_fits_two_screens_and_names_the_whole(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert len(out.splitlines()) <= 50
    assert f"asyncrl {command} --help-all" in out
    assert "--learner.*" in out
    code, out, _ = call(capsys, command, "--help-all")
    assert (code, "--buffer.max-staleness" in out) == (0, True)


@pytest.mark.parametrize("command", ["status", "why", "launch --resume", "actors add 1 --run", "audit"])
def test_a_folder_of_another_program_is_told(capsys: pytest.CaptureFixture[str], here: Path, command: str) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "run.json").write_text('{"a": 1}')
    code, _, err = call(capsys, *command.split(), "mine")
    assert code == 1
    assert ("holds no record of a run" in sentence(err)) or "config.yaml is missing" in sentence(err)


@pytest.mark.parametrize(
    ("folder", "words"),
    [("file/runs", "file is a file: choose another folder"), ("/proc/none/runs", "cannot be made in /proc")],
)
@pytest.mark.system
def test_a_folder_that_cannot_be_made_says_why(
    capsys: pytest.CaptureFixture[str], here: Path, folder: str, words: str
) -> None:
    (here / "file").touch()
    code, _, err = call(capsys, "launch", QUICKSTART, "--launch.runs-dir", folder, *UNTRIED)
    assert code == 1
    assert words in sentence(err)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("launch --help-all", "usage: asyncrl launch "),
        pytest.param(f"launch --config {QUICKSTART} --dry-run", "model:\n", marks=pytest.mark.system),
    ],
)
def test_who_reads_only_the_beginning_is_told_nothing(here: Path, words: str, first: str) -> None:
    shell = f"{sys.executable} -m asyncrl {words} | head -n 1"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith(first)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


@pytest.mark.system
def test_a_run_goes_on_when_nobody_reads_what_it_says() -> None:
    program = (
        "import os, sys; from asyncrl.tracking.terminal.live import Screen; screen = Screen(); "
        "[screen.print('x' * 99) for _ in range(3000)]; sys.stderr.write('went on')"
    )
    shell = f'{sys.executable} -c "{program}" | head -c 1'
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("x", "went on")


def test_an_interrupt_during_the_imports_is_told() -> None:
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'tyro': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from asyncrl.cli import main\n"
        "main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "asyncrl: stopped by the user.\n")


def test_an_option_before_the_command_is_told(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    code, _, err = call(capsys, "--config", "quickstart")
    assert code == 2
    assert "the command comes first, as in asyncrl launch --config" in sentence(err)


@pytest.mark.parametrize("file", ["random.py", "torch.py", "yaml.py", "typing.py", "threading.py", "dataclasses/"])
@pytest.mark.parametrize("program", [["-m", "asyncrl"], ["-P", "-c", "from asyncrl.cli import main; main()"]])
def test_a_file_that_hides_a_module_is_named(here: Path, file: str, program: list[str]) -> None:
    path = here / file / "__init__.py" if file.endswith("/") else here / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine = 1\n")
    words = [sys.executable, *program, "launch", "quickstart", "--print", "slurm"]
    done = subprocess.run(words, cwd=here, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (1, "")
    named = file.rstrip("/")
    assert f"{named} in this folder hides the module of this name that asyncrl needs: rename" in sentence(done.stderr)


def test_a_file_that_hides_a_package_of_some_runs_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "datasets.py").write_text("mine = 1\n")
    (here / "rows.json").write_text('[{"prompt": "a", "ground_truth": "b"}]')
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    words = ["--data.source", "datasets", "--data.options.path", "rows.json", "--env.name", "single_turn"]
    try:
        code, _, err = call(capsys, "launch", *words, "--env.options.score", "exact_match")
        assert code == 1
        assert "datasets.py in this folder hides the module of this name that asyncrl needs (Attr" in sentence(err)
    finally:
        sys.modules.pop("datasets", None)  # this file's


def test_files_that_hide_nothing_are_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("code.py", "score.py", "tests.py", "random.txt"):
        (here / name).write_text("mine = 1\n")
    (here / "logging").mkdir()  # a folder without __init__.py
    code, _, err = call(capsys, "launch", "quickstart", "--print", "slurm")
    assert code == 0, err


@pytest.mark.system
@pytest.mark.timeout(300)
def test_the_modules_that_a_run_imports_are_those_that_a_file_may_not_hide() -> None:
    program = (
        "import sys; import asyncrl.cli.dispatch, asyncrl.launch.api, asyncrl.tracking.collector;"
        "import asyncrl.learner.__main__, asyncrl.actors.__main__, asyncrl.actors.engines.hf.engine;"
        "import asyncrl.buffer.__main__, asyncrl.weights.__main__, transformers.models.auto.modeling_auto;"
        "from asyncrl.cli.hidden import PACKAGES, UNUSED, hiding; hidden = set(hiding(list(PACKAGES)));"
        "print(sorted(UNUSED & set(sys.modules)), sorted(hidden - set(sys.modules)))"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, env=ENVIRONMENT)
    assert done.stdout == "[] []\n", done.stderr


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    code, _, err = call(capsys, "launch", "--weights.every", "9", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "asyncrl: weights.every is 9" in err


def test_an_environment_of_the_user_is_found_from_the_working_folder(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    (here / "my_env.py").write_text(
        "from asyncrl import Environment\n\n\nclass Env(Environment):\n"
        "    def __init__(self, hops: int = 2) -> None: ...\n"
        "    async def reset(self, task): return [{'role': 'user', 'content': task['prompt']}]\n"
        "    async def step(self, message): ...\n"
    )
    code, _, err = call(capsys, "launch", "--env.name", "my_env:Env", "--env.options", "{hops: 3}", "--dry-run")
    assert code == 0, err


@pytest.mark.system
def test_a_run_in_use_is_refused_and_its_processes_named(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    run = RunFolder.create(here / "runs" / "mine", Config())
    run.note(processes={"launcher": this_process()})
    for words in (["--launch.name", "mine"], ["--resume", "runs/mine"]):
        code, _, err = call(capsys, "launch", *words, *UNTRIED)
        assert code == 1
        assert f"launcher (pid {os.getpid()})" in sentence(err)
    run.remove_temporary()


@pytest.mark.system
def test_a_run_that_is_over_is_not_overwritten(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    RunFolder.create(here / "runs" / "mine", Config()).remove_temporary()
    code, _, err = call(capsys, "launch", "--launch.name", "mine", *UNTRIED)
    assert code == 1
    assert "--resume" in sentence(err)


def test_what_a_run_cannot_change_is_refused(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    run = RunFolder.create(here / "runs" / "mine", Config())
    for words, named in (
        (["--learner.group-size", "4"], "learner.group_size"),
        (["--env.max-turns", "4"], "env.max_turns"),
        (["--launch.seed", "4"], "data.seed"),
        (["--launch.name", "other"], "launch.name"),
        (["--launch.runs-dir", "elsewhere"], "launch.runs_dir"),
    ):
        code, _, err = call(capsys, "launch", "--resume", "runs/mine", *words, "--dry-run")
        assert code == 2
        assert f"{named} cannot change" in sentence(err)
        assert "Config(" not in err
        assert "--model.path" in err or "--fork" in err
    run.remove_temporary()


def test_what_only_says_how_long_an_environment_may_take_can_change(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    run = RunFolder.create(here / "runs" / "mine", Config())
    given = ["--env.call-s", "60", "--env.retries", "5", "--env.workers", "threads", "--env.on-failures", "stop"]
    code, out, err = call(capsys, "launch", "--resume", "runs/mine", *given, *UNTRIED, "--dry-run")
    assert code == 0, err
    assert yaml.safe_load(out)["env"]["call_s"] == 60
    run.remove_temporary()


def test_a_launcher_that_comes_second_leaves_the_run_to_the_first(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """Also where the first one's processes cannot be seen, being on another host that shares the folder."""
    run = RunFolder.create(here / "runs" / "mine", Config())
    before = run.record(), run.config.read_text()
    with run.locked():
        words = ["--resume", "runs/mine", "--learner.steps", "3", "--eval.tasks", "0"]
        code, _, err = call(capsys, "launch", *words, *UNTRIED)
    assert code == 1
    assert "another launcher" in sentence(err)
    assert (run.record(), run.config.read_text()) == before
    assert run.sockets.is_dir()
    run.remove_temporary()


def test_a_run_whose_launch_was_cut_off_is_told(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    (here / "runs" / "mine" / "run.json").touch()
    for words in (["launch", "--launch.name", "mine", *UNTRIED], ["status", "runs/mine"]):
        code, _, err = call(capsys, *words)
        assert code == 1
        assert "Remove the folder" in sentence(err)


@pytest.mark.parametrize("command", ["status", "why", "report"])
def test_a_damaged_summary_of_a_run_is_told(capsys: pytest.CaptureFixture[str], here: Path, command: str) -> None:
    run = RunFolder.create(here / "mine", Config())
    run.summary.write_text("{")
    code, _, err = call(capsys, command, "mine")
    assert code == 1
    assert "summary.json cannot be read" in sentence(err)
    assert "--resume" in err
    run.remove_temporary()


def test_a_working_folder_that_is_gone_is_told(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = here / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (["status", "mine"], ["launch", "quickstart"]):
        code, _, err = call(capsys, *words)
        assert code == 1
        assert "the working folder is gone" in sentence(err)


@pytest.mark.parametrize("words", ["sandbox --port 99999", "view mine --port -1", "dashboard mine --port 65536"])
def test_a_port_that_there_is_not_is_told(capsys: pytest.CaptureFixture[str], here: Path, words: str) -> None:
    code, _, err = call(capsys, *words.split())
    assert code == 2
    assert "expected 0 to 65535" in sentence(err)


@pytest.mark.system
def test_damaged_metrics_of_a_run_are_told(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    run = RunFolder.create(here / "runs" / "mine", Config())
    run.metrics.write_text('nonsense\n{"step": 1}\n')
    code, _, err = call(capsys, "launch", "--resume", "runs/mine", *UNTRIED)
    assert code == 1
    assert "line 1: not JSON" in err
    run.remove_temporary()


@pytest.mark.system
def test_an_evaluation_without_held_out_tasks_is_warned_of(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.launch.loop.Launcher.supervise", lambda _: Outcome("finished", 0))
    (here / "tasks.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    flags = [*UNTRIED, "--data.source", "json_lines", "--data.options"]
    _, out, _ = call(capsys, "launch", *flags, "{path: tasks.jsonl}")
    assert "warning: eval.tasks is 200" in out
    assert "held_out_size" in out
    _, out, _ = call(capsys, "launch", *flags, "{path: tasks.jsonl, held_out_size: 1}", "--launch.name", "b")
    assert "warning" not in out
    for run in (here / "runs").iterdir():
        RunFolder.existing(run).remove_temporary()


def test_a_tracker_that_there_is_not_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call(capsys, "launch", "--tracking.sinks", "jsonl", "wandbb")
    assert code == 2
    assert "did you mean 'wandb'?" in sentence(err)
    monkeypatch.setitem(sys.modules, "trackio", None)
    code, _, err = call(capsys, "launch", "--tracking.sinks", "trackio")
    assert code == 2
    assert "asyncrl[trackio]" in sentence(err)
    assert not (here / "runs").exists()


def test_a_full_disk_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.launch.preflight.MIN_FREE_MB", 1 << 60)
    code, _, err = call(capsys, "launch", QUICKSTART, *UNTRIED)
    assert code == 1
    assert "MB free" in sentence(err)


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(name in out for name in dispatch.COMMANDS)
    assert call(capsys)[0] == 2


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("lunch", "launch"),
        ("help", "--help"),
        ("--versio", "--version"),
        ("reply", "replay"),
        ("train", "launch"),
    ],
)
def test_a_command_misspelt_is_told_the_nearest(capsys: pytest.CaptureFixture[str], word: str, meant: str) -> None:
    code, _, err = call(capsys, word)
    assert code == 2
    assert f"{word!r} is not a command (did you mean {meant}?): expected one of launch" in sentence(err)


def test_envs_lists_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "envs")
    assert code == 0
    assert "env.name" in out
    assert out.count("lookup ") == 2


def test_status_of_a_run_that_is_over(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    run = RunFolder.create(here / "r", Config())
    run.summary.write_text('{"steps": 3}')
    code, out, _ = call(capsys, "status", "r")
    assert code == 0
    assert '"steps": 3' in out
    run.remove_temporary()


def test_the_command_is_installed() -> None:
    out = subprocess.check_output([sys.executable, "-m", "asyncrl", "--version"], text=True, timeout=60, cwd=ROOT)
    assert out.strip() == "0.1.0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "a", "--fork", "b"], "--resume and --fork cannot go together"),
        (["--fork", "a", "--config", "b.yaml"], "--config cannot go with --resume or --fork"),
        (["--fresh"], "--fresh goes with --resume RUN"),
        (["--resume", "a", "--at-step", "3"], "--at-step goes with --resume RUN --fresh, or with --fork RUN"),
    ],
)
def test_where_a_run_begins_is_one_place(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    code, _, err = call(capsys, "launch", *words)
    assert code == 2
    assert said in sentence(err)


def test_a_step_without_a_checkpoint_is_named_with_those_there_are(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    run = RunFolder.create(here / "run", Config())
    code, _, err = call(capsys, "launch", "--fork", "run", "--at-step", "3")
    assert (code, "has no checkpoint" in sentence(err)) == (2, True)
    Checkpoints(run.checkpoints, 2).write(State(2, 2, 0, 1), [], lambda _: lambda: None, lambda _: None)
    code, _, err = call(capsys, "launch", "--resume", "run", "--fresh", "--at-step", "3")
    assert code == 2
    assert "--at-step is 3, and there is no such checkpoint: expected one of 2." in sentence(err)
    run.remove_temporary()


@pytest.mark.parametrize("command", sorted(dispatch.COMMANDS))
def test_a_system_without_the_calls_of_linux_gets_one_sentence(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows: the import fails
    monkeypatch.setattr(sys, "platform", "win32")
    code, _, err = call(capsys, command)
    assert code == 2
    assert "asyncrl runs on Linux, and this is win32" in sentence(err)
