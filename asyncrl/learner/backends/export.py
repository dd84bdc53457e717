"""Writes a stream of named weights as a folder that transformers loads, with at most one file's worth in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.checkpoint_names import as_checkpoint

FILE_BYTES = 2 << 30


def export(model: PreTrainedModel, named: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Writes config, weights and index; `named`: by the names that the model has in memory."""
    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    write_weights(as_checkpoint(model, named), folder)


def write_weights(named: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Writes weights and index. `named`: by the names that they have in a checkpoint."""
    files: dict[str, str] = {}
    total, pending, pending_bytes = 0, dict[str, Tensor](), 0

    def write() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(pending, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(pending, name))
        pending.clear()

    for name, tensor in named:
        pending[name] = tensor.to("cpu", copy=True).contiguous()
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
        if pending_bytes >= FILE_BYTES:
            write()
            pending_bytes = 0
    if pending:
        write()
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
