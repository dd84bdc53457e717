"""Writes docs/reference/configuration.md from the config tree; a test compares the two."""

from __future__ import annotations

import functools
import json
import operator
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.loading import fields

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "configuration.md"

HEAD = """# Configuration

One YAML file with one section per part; any field can be set on the command line on top of it:

```
asyncrl launch --config configs/quickstart.yaml --buffer.max-staleness 4 --learner.lr 5e-4
asyncrl launch --config configs/quickstart.yaml --dry-run   # checks everything, says where each value comes from
asyncrl launch --help                                       # this page, in the terminal
```

An unknown key, a wrong type or an impossible combination ends with one sentence that names the field, its value and the
remedy, exit code 2. Options that pick something by name also take an import path, `package.module:Name`.

This page is written by `python scripts/make_configuration_doc.py`.
"""


def page() -> str:
    parts = [HEAD]
    for name, section in Config.model_fields.items():
        parts.append(f"\n## {name}\n\n| field | default | meaning |\n| --- | --- | --- |\n")
        values = section.default.model_dump(mode="json")
        for field, info in fields(section.default.__class__):
            default = json.dumps(functools.reduce(operator.getitem, field.split("."), values))
            meaning = " ".join((info.description or "").split()).replace("|", "\\|")
            parts.append(f"| `{name}.{field}` | `{default}` | {meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
