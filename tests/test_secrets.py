"""Secrets of a run: where they are named, and that no file of its folder holds them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import redaction
from asyncrl.actors.player import environment
from asyncrl.config import Config
from asyncrl.config.rules import warnings
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parents[1]
CLEAR, NAMED, HEADER, IN_URL = "sk-clear-0123456789", "sk-named-0123456789", "Bearer-0123456789", "pw-0123456789"


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apikey",
        "OPENAI_API_KEY",
        "X-Api-Key",
        "hf_token",
        "token",
        "password",
        "Authorization",
        "client_secret",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert redaction.is_secret(name)


@pytest.mark.parametrize(
    "name", ["api_key_env", "max_tokens_per_turn", "stop_token_ids", "keys_per_task", "tool_calls"]
)
def test_names_of_other_fields(name: str) -> None:
    assert not redaction.is_secret(name)


def test_what_is_masked_and_what_stays() -> None:
    values = {
        "api_key": CLEAR, "url": f"http://me:{IN_URL}@host/?key={NAMED}", "n": [{"headers": {"X": HEADER}}],
        "max_tokens": 256, "token": "${MINE}", "name": "lookup",
    }  # fmt: skip
    assert redaction.masked(values) == {
        "api_key": "[secret]", "url": "http://me:[secret]@host/?key=[secret]", "n": [{"headers": {"X": "[secret]"}}],
        "max_tokens": 256, "token": "${MINE}", "name": "lookup",
    }  # fmt: skip
    found = dict(redaction.given_in_clear(values))
    assert set(found) == {"api_key", "url", "n.headers.X"}


def test_a_shipped_config_is_masked_nowhere() -> None:
    for file in (ROOT / "configs").glob("*.yaml"):
        values = Config.load(file).model_dump(mode="json")
        assert redaction.masked(values) == values, file


def test_a_secret_in_the_clear_is_warned_of_without_its_value() -> None:
    (said,) = warnings(Config.load(None, {"env.options": {"api_key": CLEAR}}))
    assert said.startswith("env.options.api_key holds a secret")
    assert CLEAR not in said
    assert warnings(Config.load(None, {"env.options": {"api_key": "${MINE}"}})) == []


def test_an_option_that_names_a_variable_gets_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("class Env:\n    def __init__(self, api_key: str): self.api_key = api_key\n")
    named = {"env.name": f"{tmp_path}/own.py:Env", "env.options": {"api_key": "${ASYNCRL_TEST_MINE}"}}
    with pytest.raises(ConfigError, match="no ASYNCRL_TEST_MINE"):
        environment(Config.load(None, named))
    monkeypatch.setenv("ASYNCRL_TEST_MINE", NAMED)
    assert environment(Config.load(None, named))().api_key == NAMED  # type: ignore[attr-defined]


def test_a_log_line_and_a_traceback_are_redacted() -> None:
    code = (
        "import logging, threading, warnings\n"
        "from asyncrl.process import logs\n"
        "log = logs.setup('x')\n"
        "import os\n"
        "key = os.environ['MY_API_KEY']\n"
        "log.error('refused: %s', key)\n"
        "warnings.warn(key)\n"
        "try:\n    raise ValueError(key)\nexcept ValueError:\n    log.exception('failed')\n"
        "t = threading.Thread(target=int, args=(key,)); t.start(); t.join()\n"
        "int(key)\n"
    )
    environment = os.environ | {"MY_API_KEY": CLEAR, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert CLEAR not in done.stderr
    assert done.stderr.count(redaction.MASK) >= 5


OWN = f"""
import logging
import os

from asyncrl.actors.envs.lookup import LookupEnv


class Shop(LookupEnv):
    refused = False

    def __init__(self, api_key: str, token: str, servers: list):
        super().__init__()
        assert (api_key, token) == ({CLEAR!r}, {NAMED!r})
        assert servers[0]["headers"]["Authorization"] == {HEADER!r}
        self.secrets = " ".join([api_key, token, {HEADER!r}, {IN_URL!r}, os.environ["SHOP_PASSWORD"]])
        logging.getLogger("shop").warning("the keys are %s", self.secrets)

    async def step(self, message):
        if not Shop.refused:
            Shop.refused = True
            raise ValueError(f"refused: {{self.secrets}}")
        return await super().step(message)
"""


@pytest.mark.system
def test_no_file_of_a_run_holds_a_secret(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "shop.py").write_text(OWN)
    (tmp_path / "run.yaml").write_text(
        f"""
env:
  name: shop.py:Shop
  options:
    api_key: {CLEAR}
    token: ${{SHOP}}
    servers: [{{url: "http://me:{IN_URL}@127.0.0.1:9/", headers: {{Authorization: {HEADER}}}}}]
  max_turns: 6
actors: {{slots: 16, max_new_tokens: 48}}
buffer: {{capacity: 64}}
learner: {{steps: 1, groups_per_step: 2, group_size: 2}}
eval: {{tasks: 4}}
tracking: {{sinks: [jsonl, wandb, trackio]}}
launch: {{name: first}}
"""
    )
    password = "pass-0123456789"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SHOP": NAMED, "SHOP_PASSWORD": password}
    command = [sys.executable, "-m", "asyncrl", "launch", "--config", "run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "first"
    assert "the keys are [secret]" in (run / "logs" / "actor-0.log").read_text()  # it had something to redact
    secrets = (CLEAR, NAMED, HEADER, IN_URL, password)
    holding = {
        (str(file.relative_to(run)), secret)
        for file in run.rglob("*")
        if file.is_file()
        for secret in secrets
        if secret.encode() in file.read_bytes()
    }
    # The configuration itself: what stands there in the clear, and for its owner only.
    assert holding == {("config.yaml", secret) for secret in (CLEAR, HEADER, IN_URL)}
    assert stat.S_IMODE((run / "config.yaml").stat().st_mode) == 0o600
    assert not any(secret in done.stdout + done.stderr for secret in secrets)
    assert "env.options.api_key holds a secret" in " ".join(done.stdout.split())
