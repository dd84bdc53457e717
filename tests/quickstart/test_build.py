import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.data.sources.lookup import LookupSource
from asyncrl.quickstart import CHECKPOINT, build, ensure_model
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
    assert ensure_model() == CHECKPOINT
    assert (CHECKPOINT / "model.safetensors").stat().st_size < 4e6
    loaded = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    ours = build_tokenizer()
    assert tokenizer.get_vocab() == ours.get_vocab()
    assert tokenizer.chat_template == ours.chat_template
    shapes = {name: value.shape for name, value in build_model(ours).state_dict().items()}
    assert {name: value.shape for name, value in loaded.state_dict().items()} == shapes
    assert all(torch.isfinite(value).all() for value in loaded.state_dict().values())


def test_it_starts_with_the_form_and_with_bad_habits():
    assert 0.1 <= success(CHECKPOINT, 64, temperature=1.0) <= 0.5
    # What is most likely is right: the bad habits sit in the tails, which is where sampling meets them.
    assert success(CHECKPOINT, 64, temperature=0.0) >= 0.9


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


def test_a_missing_model_is_built_once(tmp_path, monkeypatch):
    built = []

    def fake_make_checkpoint(folder):
        built.append(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(build, "make_checkpoint", fake_make_checkpoint)
    folder = tmp_path / "deep" / "checkpoint"
    assert ensure_model(folder) == ensure_model(folder) == folder
    assert len(built) == 1
    assert [entry.name for entry in folder.parent.iterdir()] == ["checkpoint"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_made_again_it_starts_where_the_packaged_one_does(tmp_path):
    torch.set_num_threads(1)
    make_checkpoint(tmp_path / "model")
    assert abs(success(tmp_path / "model", 400, 1.0) - success(CHECKPOINT, 400, 1.0)) < 0.1
