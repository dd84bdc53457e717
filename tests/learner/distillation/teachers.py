"""A tiny teacher in a folder, with the quickstart's tokenizer, and a policy that learns from it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config import Config
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.trainer import Trainer
from asyncrl.model import QUICKSTART
from tests.learner.tiny import SIZE, tiny_config, tiny_model

WORDS = 256
"""Of the teacher's head: the quickstart's tokenizer has 243, the policy's head knows the first 40."""


def teacher_in(folder: Path, seed: int = 5, **size: Any) -> Path:
    """Writes a Llama of one layer, so that the teacher is another kind of model than the policy."""
    torch.manual_seed(seed)
    shapes = SIZE | {"vocab_size": WORDS, "num_hidden_layers": 1} | size
    LlamaForCausalLM(LlamaConfig(**shapes, tie_word_embeddings=False)).save_pretrained(folder)
    return tokenizer_in(folder)


def tokenizer_in(folder: Path) -> Path:
    """Copies the quickstart's into the folder."""
    for file in QUICKSTART.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder / file.name)
    return folder


def taught_config(teacher: Path | str, learner: dict[str, Any] | None = None, **given: Any) -> Config:
    return tiny_config(**(learner or {}), teacher={"path": str(teacher), **given})


def a_trainer(config: Config) -> Trainer:
    """Of the same initial policy each time."""
    return Trainer(config, TorchBackend(config, tiny_model(), device="cpu"), Objective(config.learner))
