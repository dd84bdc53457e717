import asyncio
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl import model
from asyncrl.config import ModelConfig
from asyncrl.data.sources.lookup import LookupSource
from asyncrl.errors import ConfigError
from asyncrl.model import QUICKSTART, resolve_path
from asyncrl.quickstart.build import build_model, make_checkpoint, warm_up
from asyncrl.quickstart.tokenizer import build_tokenizer
from tests.quickstart.lockstep import play


def success(folder, tasks, temperature):
    source = LookupSource(held_out_size=tasks)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = [source.held_out(index) for index in range(tasks)]
    return sum(asyncio.run(play(loaded, tokenizer, held_out, temperature))) / tasks


def test_the_weights_in_the_package_are_those_of_this_code():
    assert resolve_path(ModelConfig()) == QUICKSTART
    assert (QUICKSTART / "model.safetensors").stat().st_size < 4e6
    loaded = AutoModelForCausalLM.from_pretrained(QUICKSTART)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    ours = build_tokenizer()
    assert tokenizer.get_vocab() == ours.get_vocab()
    assert tokenizer.chat_template == ours.chat_template
    shapes = {name: value.shape for name, value in build_model(ours).state_dict().items()}
    assert {name: value.shape for name, value in loaded.state_dict().items()} == shapes
    assert all(torch.isfinite(value).all() for value in loaded.state_dict().values())


@pytest.mark.system
def test_it_starts_with_the_form_and_with_bad_habits():
    assert 0.1 <= success(QUICKSTART, 64, temperature=1.0) <= 0.5
    # Greedily it adds, whatever sign the question shows, and makes few other errors.
    assert 0.2 <= success(QUICKSTART, 64, temperature=0.0) <= 0.6


@pytest.mark.system
@pytest.mark.system
def test_the_warm_up_learns_and_is_reproducible():
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    runs = []
    for _ in range(2):
        fresh = build_model(tokenizer, seed=3)
        runs.append((warm_up(fresh, tokenizer, seed=3, steps=8), fresh.state_dict()))
    (losses, first), (again, second) = runs
    assert losses == again
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert losses[-1] < losses[0]


def test_a_missing_model_is_refused_and_the_script_named(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "QUICKSTART", tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"scripts/make_quickstart_model\.py"):
        resolve_path(ModelConfig())


@pytest.mark.system
def test_the_script_makes_a_model_that_is_then_found(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "checkpoint"
    command = [sys.executable, "scripts/make_quickstart_model.py", "--out", str(folder), "--steps", "1"]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    monkeypatch.setattr(model, "QUICKSTART", folder)
    assert resolve_path(ModelConfig()) == folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_made_again_it_starts_where_the_packaged_one_does(tmp_path):
    torch.set_num_threads(1)
    make_checkpoint(tmp_path / "model")
    assert abs(success(tmp_path / "model", 400, 1.0) - success(QUICKSTART, 400, 1.0)) < 0.1
