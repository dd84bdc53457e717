"""The page "Use the trained model": its code, run on a model that was just trained, knows nothing of asyncrl."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.model import QUICKSTART
from tests.trained import ROOT, train

PAGE = ROOT / "docs" / "how-to" / "use-the-model.md"
FOLDER = "runs/NAME/checkpoints/step-000100/hf"

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


def test_the_pages_code_loads_the_model_and_lets_it_act(trained: Path, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert FOLDER in code
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    checked = code.replace(FOLDER, str(trained)) + "import sys; assert 'asyncrl' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-c", checked], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('<tool_call>{"name": "lookup", "arguments": {"key": "')


def test_what_is_exported_was_trained_and_is_whole(trained: Path) -> None:
    before, after = load_file(QUICKSTART / "model.safetensors"), load_file(trained / "model.safetensors")
    assert before.keys() == after.keys()
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (trained / "chat_template.jinja").read_text() == (QUICKSTART / "chat_template.jinja").read_text()
