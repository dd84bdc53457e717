"""Counts lines of code: no blanks, no comments, no docstrings.

python scripts/code_lines.py FILE ...
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(file: Path) -> int:
    """Lines of `file` that hold code. Every string that stands alone as a statement is a docstring."""
    text = file.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


if __name__ == "__main__":
    counts = [(code_lines(Path(name)), name) for name in sys.argv[1:]]
    for count, name in counts:
        print(f"{count:6}  {name}")
    if len(counts) > 1:
        print(f"{sum(count for count, _ in counts):6}  together")
