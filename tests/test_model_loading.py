import shutil

import pytest
import torch

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.model import QUICKSTART, load_folder, load_model, load_tokenizer


def test_a_loaded_model_does_not_change_with_its_file(tmp_path):
    """Its folder may be written again while the run goes on, and a file cut short takes mapped pages with it."""
    folder = shutil.copytree(QUICKSTART, tmp_path / "model")
    model = load_folder(folder, torch.float32, "a test asks")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_missing_folder_is_named():
    with pytest.raises(ConfigError, match=r"model.path is '/nowhere'.*no such folder"):
        load_model(ModelConfig(path="/nowhere"))


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer that transformers can load"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_the_command_that_makes_a_missing_model_is_named():
    missing = ModelConfig(path="./nowhere", made_with="python make.py")
    with pytest.raises(ConfigError, match=r"no such folder: make it with `python make.py`\."):
        load_tokenizer(missing)
