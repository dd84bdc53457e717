"""Rows as a parquet file, through pyarrow (an extra: `parquet`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

TYPES = {
    "int64": ("branch", "group", "index", "attempt", "draw", "batch", "version", "staleness", "policy_tokens", "tokens",
              "turns"),
    "float64": ("importance_weight", "group_weight", "reward"),
    "string": ("actor", "task", "state", "reason", "env", "stop_reason", "digest"),
    "bool_": ("payload",),
    "int64s": ("versions", "version_tokens"),
}  # fmt: skip
"""Of the columns of `rows.of_run`: told, since a column may be empty."""


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Raises ConfigError without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("--format is parquet, which needs pyarrow: pip install 'asyncrl[parquet]'.") from error
    types = {name: kind for kind, names in TYPES.items() for name in names}
    kinds = {kind: getattr(pyarrow, kind)() for kind in TYPES if kind != "int64s"}
    kinds["int64s"] = pyarrow.list_(pyarrow.int64())
    schema = pyarrow.schema([(name, kinds[types[name]]) for name in rows[0]] if rows else [])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), path)
