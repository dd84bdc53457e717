"""What a user does wrong in the first hour is told before anything starts, in one sentence with the remedy."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.api import prepare
from asyncrl.launch.checks import first_reset
from tests.launch.fakes import running
from tests.waiting import until

MISTAKES = Path(__file__).parent / "mistakes.py"


def env(name: str) -> dict[str, Any]:
    return {"env": {"name": f"mistakes.py:{name}"}}


def source(name: str) -> dict[str, Any]:
    return {"data": {"source": f"mistakes.py:{name}"}, **env("Fine")}


def scored(name: str, score: str = "score") -> dict[str, Any]:
    single = {"name": "single_turn", "options": {"score": f"mistakes.py:{score}"}}
    return {"data": {"source": f"mistakes.py:{name}"}, "env": single}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "an environment without methods": (env("NoMethods"), "a class without reset and step and close"),
    "an environment without step": (env("NoStep"), "a class without step: an environment has `async def reset(self"),
    "reset is a plain function": (env("SyncReset"), "a class that defines reset with `def`: write `async def`"),
    "step is a plain function": (env("SyncStep"), "a class that defines step with `def`: write `async def`"),
    "close is a plain function": (env("SyncClose"), "a class that defines close with `def`: write `async def`"),
    "a role of ShareGPT in the data": (
        scored("ShareGPT"), "a message has the role 'human', which the model's chat template does not know: write user"
    ),
    "a role that the template does not know": (
        env("Observation"), "has the role 'observation', which the model's chat template does not know: write system, "
    ),
    "reset reads a column that is not there": (
        env("NeedsColumn"), "environment.reset: KeyError: 'question' (mistakes.py, line "
    ),
    "reset takes too long": (
        {"env": {"name": "mistakes.py:Hangs", "call_s": 0.3}}, "environment.reset did not return within 0.3 s"
    ),
    "reset returns a text": (env("Text"), "environment.reset gave 'What is 1 + 1?'; expected messages"),
    "the constructor raises": (env("BadInit"), "its constructor: ValueError: no service at home (mistakes.py, line "),
    "a tool without type hints, in code": (env("Untyped"), "tool untyped: parameter a has no type hint; add one"),
    "a tool without type hints, in the config": (
        {"env": {"name": "tools", "options": {"tools": ["mistakes.py:untyped"], "score": "exact_match"}}},
        "env.options.tools: tool untyped: parameter a has no type hint",
    ),
    "tools that are plain functions": (env("NoSuper"), "make it one with Tool.from_function"),
    "reset calls sys.exit": (env("Exits"), "it called sys.exit(1)"),
    "tools without a score": ({"env": {"name": "tools"}}, "env.options.score is not set"),
    "an agent's parameters in the other order": (env("swapped"), "a function of (client, task): an agent's first two"),
    "an agent without a client": (env("one"), "a function of (task): an agent's first two parameters"),
    "a plain agent with other names": (env("plain"), "a function of (question, client): an agent's first two"),
    "what is named is no function": (env("instance"), "which is of type int"),
    "a source without members": (source("NoMembers"), "without a method `task(index)` and a method `held_out(index)`"),
    "a source without held_out": (source("NoHeldOut"), "without a method `held_out(index)` and an attribute"),
    "tasks without a prompt": (source("NoPrompt"), "a task without 'prompt': its keys are id, question"),
    "a source that is asynchronous": (source("AsyncTask"), "that defines task with `async def`: write `def`"),
    "a source that raises": (source("Raises"), "KeyError: 'missing' (mistakes.py, line "),
    "tasks that are texts": (source("Texts"), "a str: expected a mapping with `id` and `prompt`"),
    "a prompt that is a list of texts": (source("BadMessages"), "whose prompt is ['a', 'b']: expected a text"),
    "a task with a Python object": (source("Unpackable"), "which no ticket can carry"),
    "ground_truth is null": (scored("NullTruth"), "has no ground_truth, which the score score needs"),
    "tasks without ground_truth": (scored("Source"), "its keys are id, prompt. Map a column with"),
    "a source of a mix without ground_truth": (
        {"data": {"source": "mix", "options": {"sources": {
            "a": {"source": "lookup"}, "b": {"source": "mistakes.py:Source"}}}},
         "env": {"name": "mix", "options": {"envs": {
             "a": {"name": "lookup"},
             "b": {"name": "single_turn", "options": {"score": "mistakes.py:score"}}}}}},
        "has no ground_truth, which the score score needs",
    ),
    "prompts longer than a row": (scored("Long"), "has a prompt of 15000 tokens, and env.max_tokens"),
    "an engine that is not installed": ({"actors": {"engine": "vllm"}}, "is 'vllm', which is not installed here: pip"),
    "an engine's name misspelt": ({"actors": {"engine": "vlllm"}}, "is 'vlllm': expected one of hf, vllm"),
    "a hub model that cannot be had": ({"model": {"path": "nobody/nothing"}}, "the hub does not provide it"),
    "a package of another Python": (
        {"data": {"source": "verifiers", "options": {"taskset": {"id": "x"}}},
         "env": {"name": "verifiers", "options": {"taskset": {"id": "x"}}}},
        "does not have the package: pip install verifiers in a Python of its own",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(MISTAKES, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize("mistake", CASES)
def test_a_mistake_is_told_before_anything_starts(mistake: str, here: Path) -> None:
    config, words = CASES[mistake]
    with pytest.raises(ConfigError) as told:
        prepare(Config.model_validate(config))
    assert words in str(told.value)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "config",
    [env("agent"), source("Source"), scored("Source", "score_default"), env("HandedOn"), {}],
    ids=["agent", "env", "score", "handed on", "quickstart"],
)
def test_what_is_right_passes(config: dict[str, Any]) -> None:
    assert prepare(Config.model_validate(config)).warnings == ()


def test_a_row_that_raises_is_a_warning() -> None:
    (warning,) = prepare(Config.model_validate(source("RaisesOnce"))).warnings
    assert warning.startswith("1 of the first 40 tasks cannot be played")
    assert "ZeroDivisionError: division by zero (mistakes.py, line " in warning


@pytest.mark.parametrize("mistake", ["reset reads a column that is not there", "tasks without ground_truth"])
def test_a_dry_run_tells_it_too(mistake: str) -> None:
    config, words = CASES[mistake]
    with pytest.raises(ConfigError) as told:
        prepare(Config.model_validate(config), checks="all")
    assert words in str(told.value)


def test_the_environment_of_the_trial_is_closed(here: Path) -> None:
    prepare(Config.model_validate(env("Closes")))
    assert (here / "closed").exists()


def test_the_trial_of_reset_can_be_left_out() -> None:
    config = Config.model_validate({**env("NeedsColumn"), "launch": {"try_reset": False}})
    assert prepare(config).warnings == ()


def test_the_trial_of_reset_resolves_references_as_an_actor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = env("Keyed")
    keyed["env"]["options"] = {"api_key": "${MY_KEY}", "since": datetime.date(2026, 5, 17), "urls": ["${MY_URL}/v1"]}
    monkeypatch.setenv("MY_KEY", "key-of-mine")
    monkeypatch.setenv("MY_URL", "http://service")
    assert prepare(Config.model_validate(keyed)).warnings == ()
    monkeypatch.setenv("MY_KEY", "another-key")
    with pytest.raises(ConfigError, match=r"no service for \[secret\] since 2026-05-17") as told:
        prepare(Config.model_validate(keyed))
    assert "another-key" not in str(told.value)
    monkeypatch.delenv("MY_URL")
    with pytest.raises(
        ConfigError, match=r"env\.options: an option names \$\{MY_URL\}, and this process's environment"
    ):
        prepare(Config.model_validate(keyed))


@pytest.mark.parametrize("session", [False, True], ids=["of its group", "of a session of its own"])
def test_the_trial_of_reset_waits_for_no_child_that_the_environment_forked(session: bool, here: Path) -> None:
    forks = {"env": {"name": "mistakes.py:Forks", "options": {"session": session}}}
    try:
        assert prepare(Config.model_validate(forks)).warnings == ()
        child = int((here / "child").read_text())
        assert session or until(lambda: not running(child)), "it was left behind"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((here / "child").read_text()), signal.SIGKILL)


def test_the_trial_of_reset_has_the_time_of_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(first_reset, "_run", lambda recipe, deadline_s: given.append(deadline_s) or "")
    config = Config.model_validate({"env": {"call_s": 50.0, "retries": 3}})
    first_reset.check_reset(config, [{"id": "a", "prompt": ""}, {"id": "b", "prompt": ""}])
    assert given == [first_reset.START_S + 2 * 4 * (50.0 + 50.0)]  # tasks, attempts, reset and close


def test_the_checks_load_no_torch() -> None:
    program = (
        "import sys; from asyncrl.config import Config; from asyncrl.launch.api import prepare; prepare(Config());"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
