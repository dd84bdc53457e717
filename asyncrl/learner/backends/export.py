"""A stream of named weights as a folder that transformers loads: never more than one file's worth in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

FILE_BYTES = 2 << 30


def export(model: PreTrainedModel, named: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Config, weights and index."""
    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    files: dict[str, str] = {}
    total, held, held_bytes = 0, dict[str, Tensor](), 0

    def write() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(held, name))
        held.clear()

    for name, tensor in named:
        held[name] = tensor.to("cpu", copy=True).contiguous()
        held_bytes += tensor.nbytes
        total += tensor.nbytes
        if held_bytes >= FILE_BYTES:
            write()
            held_bytes = 0
    if held:
        write()
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
