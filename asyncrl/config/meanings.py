"""What the fields of the configuration mean: their docstrings, read from the source where they are shown.

pydantic can read them, too (`use_attribute_docstrings`), but in every process that imports the configuration, and that
is a fifth of the time of the import.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys

from pydantic import BaseModel

from asyncrl.config.loading import section_of


def meaning(model: type[BaseModel], path: str) -> str:
    """The docstring of a field by its path, as `learner.lora.r`; empty where there is none."""
    name, _, rest = path.partition(".")
    inner = section_of(model.model_fields[name])
    if rest and inner is not None:
        return meaning(inner, rest)
    return next((found[name] for base in model.__mro__ if name in (found := _docstrings(base))), "")


@functools.cache
def _docstrings(cls: type) -> dict[str, str]:
    """Those of the fields that this very class declares."""
    declared = _classes(cls.__module__).get(cls.__qualname__)
    if declared is None:
        return {}
    found = {}
    for field, after in zip(declared.body, declared.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            text = after.value.value if isinstance(after.value, ast.Constant) else None
            if isinstance(text, str):
                found[field.target.id] = inspect.cleandoc(text)
    return found


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    if module == "builtins":
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
