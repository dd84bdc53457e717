"""The model and its tokenizer, found and loaded the same way by every role."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

QUICKSTART = Path(__file__).parent / "quickstart" / "checkpoint"
"""The folder that `model.path: quickstart` means; scripts/make_quickstart_model.py makes it."""


def resolve_path(model: ModelConfig, field: str = "model.path") -> Path:
    """The folder of `model.path`; `quickstart` is part of the package, a hub name is downloaded. Raises ConfigError."""
    if model.path == "quickstart":
        if not (QUICKSTART / "model.safetensors").is_file():
            raise ConfigError(
                f"{field} is quickstart, and {QUICKSTART} has no model.safetensors: it comes with asyncrl; make it "
                "again with `python scripts/make_quickstart_model.py` of the repository."
            )
        return QUICKSTART
    folder = local_path(model, field)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model.path))
    # The hub client raises OSError subclasses for missing, refused or unreachable repositories (also when offline).
    except (OSError, HFValidationError) as error:
        raise ConfigError(
            f"{field} is {model.path!r}: no folder has that name, and the hub does not provide it "
            f"({type(error).__name__}). Give a folder with config.json, or a hub name that this machine can reach."
        ) from error


def local_path(model: ModelConfig, field: str = "model.path") -> Path | None:
    """The folder that `model.path` names; None for a hub name. Raises ConfigError for a path without a folder."""
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return folder
    if "://" in model.path:
        raise ConfigError(
            f"{field} is {model.path!r}, a URL: expected the name on the hub ({_hub_name(model.path)}), or a folder."
        )
    if folder.is_file():
        raise ConfigError(
            f"{field} is {model.path!r}, a file: expected a Hugging Face folder, with config.json, a tokenizer and "
            "safetensors (a GGUF file cannot be trained)."
        )
    if folder.is_absolute() or model.path.startswith((".", "~")) or model.path.count("/") > 1:
        if model.made_with:
            raise ConfigError(
                f"model.path is {model.path!r}, and there is no such folder: make it with `{model.made_with}`."
            )
        raise ConfigError(
            f"{field} is {model.path!r}, and there is no such folder: expected a Hugging Face folder (with "
            "config.json and a tokenizer), a hub name, or `quickstart`."
        )
    return None


def load_tokenizer(model: ModelConfig, field: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer in the model's folder. Raises ConfigError if there is none."""
    from transformers import AutoTokenizer

    folder = resolve_path(model, field)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{field} is {model.path!r}, and {folder} has no tokenizer that transformers can load "
            f"({_first_line(error)}). Put tokenizer.json and tokenizer_config.json beside config.json."
        ) from error
    return tokenizer


def positions(model: ModelConfig) -> int | None:
    """The largest number of tokens in one row that the model is made for; None: its config.json does not say.
    Raises ConfigError."""
    try:
        config = json.loads((resolve_path(model) / "config.json").read_text())
        most = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path is {model.path!r}, whose config.json cannot be read: {error}.") from error
    return most if isinstance(most, int) else None


def teacher_folder(path: str) -> Path:
    """The folder of `learner.teacher.path`, which may be a checkpoint of a run too. Raises ConfigError."""
    folder = resolve_path(ModelConfig(path=path), "learner.teacher.path")
    if (folder / "config.json").is_file():
        return folder
    if (folder / "hf" / "config.json").is_file():
        return folder / "hf"
    raise ConfigError(
        f"learner.teacher.path is {path!r}, and {folder} holds no model: expected a folder with config.json, a "
        f"tokenizer and safetensors, or a checkpoint of a run ({_example(folder)}), or a hub name."
    )


def load_model(model: ModelConfig, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """The causal language model on the CPU, in `dtype` (default: `model.dtype`). Raises ConfigError."""
    return load_folder(resolve_path(model), dtype or model.dtype, f"model.path is {model.path!r}")


def load_folder(folder: Path, dtype: torch.dtype | str, origin: str) -> PreTrainedModel:
    """A causal language model from a Hugging Face folder. `origin` names its field in errors."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # The output of a role is a log, where progress bars would be noise.
    logging.disable_progress_bar()
    wanted: Any = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{origin}, and {folder} holds no causal language model that transformers can load "
            f"({_first_line(error)}). It needs config.json and weights as safetensors."
        ) from error
    with torch.no_grad():
        for tensor in (*loaded.parameters(), *loaded.buffers()):
            # safetensors maps the file: overwriting it would change the weights of a running process.
            tensor.data = tensor.data.clone()
    return loaded


def _hub_name(url: str) -> str:
    """The two parts of a hub name in its address.

    >>> _hub_name("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main")
    'Qwen/Qwen3-0.6B'
    """
    return "/".join(url.partition("://")[2].split("/")[1:3])


def _example(folder: Path) -> str:
    """The newest checkpoint of the run in `folder`, or how one is named."""
    found = sorted(folder.glob("checkpoints/step-*"))
    return str(found[-1]) if found else "RUN/checkpoints/step-000100"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
