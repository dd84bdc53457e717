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


@pytest.mark.system
def test_a_teacher_begins_as_the_start_model_and_learns_from_the_oracle(tmp_path):
    torch.set_num_threads(1)
    start, teacher, again = (tmp_path / name for name in ("start", "teacher", "again"))
    script("make")("reversal", start, steps=4)
    losses = [script("make_teacher")("reversal", folder, start, steps=8) for folder in (teacher, again)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    loss_of_start, loss_of_teacher = (oracle_loss(folder) for folder in (start, teacher))
    assert losses[0][0] == pytest.approx(loss_of_start, rel=0.1), "the first step is the start model's"
    assert loss_of_teacher < loss_of_start


def oracle_loss(folder):
    """Of the model on one text and its reverse."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "abcdef"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids, given = (tokenizer.encode(text) for text in (f"{prompt}fedcba", prompt))
    labels = [-100] * len(given) + ids[len(given) :]
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss)


def test_a_teacher_without_its_start_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_models.py", "reversal", "--teacher", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="reversal holds no start model, from which a teacher begins"):
        script("main")()


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
