"""`--dry-run` of every configuration that comes with asyncrl: it passes, or says what this machine lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from asyncrl.config.shipped import names
from tests.cli.test_cli import call, sentence

ROOT = Path(__file__).parents[1]
_VLLM = "actors.engine is 'vllm', which is not installed here: pip install 'asyncrl[vllm]'"
_TEACHER = "learner.teacher.path is 'runs/teacher/checkpoints/step-000100', and there is no such folder"
LACKING = {
    "code-qwen3-8b": _VLLM,
    "gsm8k-qwen3-0.6b": _VLLM,
    "one-gpu": _VLLM,
    "tools-qwen3-4b": _VLLM,
    "distil": _TEACHER,
    "distil-server": _TEACHER,
    "openenv": "there is no program '.venv-gyms/bin/python' here",
    "verifiers": "data.options.python is '.venv-verifiers/bin/python', which does not start (No such file",
}
"""What is said where a machine does not have it; the other configurations need nothing."""


@pytest.mark.system
@pytest.mark.parametrize("name", names())
def test_it_passes_or_says_what_is_lacking(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, err = call(capfd, "launch", name, "--dry-run")
    if code == 0:
        assert "model" in yaml.safe_load(out)
        assert "Traceback" not in err
    else:
        assert (code, out) == (2, ""), err
        assert name in LACKING, err
        assert LACKING[name] in sentence(err)


def test_what_may_be_lacking_is_said_of_configurations_that_are_there() -> None:
    assert set(LACKING) <= set(names())
