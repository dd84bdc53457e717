"""The tiny model of the quickstart: a real architecture, its own tokenizer, made here in about a minute.

Its weights (2 MB) are part of the package; `scripts/make_quickstart_model.py` makes them again.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"


def ensure_model(folder: Path = CHECKPOINT) -> Path:
    """The folder with the quickstart's model and tokenizer; built if it is not there (a minute of one core)."""
    if (folder / "model.safetensors").is_file():
        return folder
    from asyncrl.quickstart.build import make_checkpoint

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        built = Path(scratch) / "checkpoint"
        make_checkpoint(built)
        try:
            os.rename(built, folder)
        except OSError:  # somebody else was faster, or the folder holds other things
            if not (folder / "model.safetensors").is_file():
                raise
    return folder
