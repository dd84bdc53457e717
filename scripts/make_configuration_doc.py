"""Writes docs/reference/configuration.md from the config tree; a test compares the two."""

from __future__ import annotations

import functools
import json
import operator
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.loading import fields
from asyncrl.config.meanings import meaning
from asyncrl.config.resuming import ONLY_IF, change

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"

HEAD = """# Configuration

One YAML file with one section per part; any field can be set on the command line on top of it:

```
asyncrl launch --config configs/quickstart.yaml --buffer.max-staleness 4 --learner.lr 5e-4
asyncrl launch --config configs/quickstart.yaml --dry-run   # checks everything, says where each value comes from
asyncrl launch --help-all                                       # this page, in the terminal
```

An unknown key, a wrong type or an impossible combination ends with one sentence that names the field, its value and the
remedy, exit code 2. Options that pick something by name also take an import path, `package.module:Name`.

This page is written by `python scripts/make_configuration_doc.py`.

The column `--resume` says what a changed field means to a run that is resumed (`asyncrl/config/resuming.py`):

| `--resume` | meaning |
| --- | --- |
| refused | what the ledger or the checkpoints hold was made with the previous value; a fork (`--fork`) may have \
another name and folder, nothing else of these |
| branch | the field decides what a training step gives. The run uses the new value from the checkpoint on. If \
steps after the checkpoint are recorded, they would be redone with other weights: a new branch begins at the \
checkpoint, and its reason names the fields |
| free | the new value holds from now on, and nothing that was recorded depends on it |
"""


def page() -> str:
    parts = [HEAD]
    for name, section in Config.model_fields.items():
        parts.append(f"\n## {name}\n\n| field | default | `--resume` | meaning |\n| --- | --- | --- | --- |\n")
        values = section.default.model_dump(mode="json")
        for field, _ in fields(section.default.__class__):
            default = json.dumps(functools.reduce(operator.getitem, field.split("."), values))
            means = " ".join(meaning(section.default.__class__, field).split()).replace("|", "\\|")
            parts.append(f"| `{name}.{field}` | `{default}` | {_resumed(f'{name}.{field}')} | {means} |\n")
    return "".join(parts)


def _resumed(field: str) -> str:
    """What `--resume` makes of another value."""
    condition = f", if {ONLY_IF[field]}; else free" if field in ONLY_IF else ""
    return f"{change(field)}{condition}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
