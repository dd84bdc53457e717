"""examples/tasks/make_models.py: the start models of the tasks."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.plugins import resolve
from tests.examples.test_tasks import FOLDER, NAMES, config, part


def script(what):
    return resolve(f"{FOLDER / 'make_models.py'}:{what}", None, "script")


def test_every_task_of_the_folder_is_made():
    assert script("NAMES") == NAMES
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(NAMES)


@pytest.mark.system
def test_a_model_is_made_again_the_same_and_played(tmp_path):
    torch.set_num_threads(1)
    losses = [script("make")("reversal", tmp_path / name, seed=3, steps=4) for name in ("first", "second")]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    assert tokenizer.decode(tokenizer.encode("abcd")) == "abcd"
    assert tokenizer.model_max_length == config("reversal").env.max_tokens
    sampled, greedy = script("measured")("reversal", tmp_path / "first", 4)
    assert (sampled.tasks, greedy.tasks, greedy.failed) == (4, 4, 0)


def test_a_task_that_there_is_not_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_models.py", "chess"])
    with pytest.raises(SystemExit):
        script("main")()
    assert "there is no task 'chess': expected some of reversal, wordle" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_start_model_succeeds_now_and_then(tmp_path):
    torch.set_num_threads(1)
    script("make")("reversal", tmp_path / "model")
    _, greedy = script("measured")("reversal", tmp_path / "model", 200)
    assert 0.05 <= greedy.share <= 0.4
    assert part("reversal", "STEPS") > 0
