"""A calculator as a tool, which evaluates arithmetic and nothing else, and an environment with this tool."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from asyncrl.actors.envs.tool import ToolError
from asyncrl.actors.envs.tool_env import ToolEnvironment
from asyncrl.rewards import ScoreSpec

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_MAX_CHARS = 200  # without `**`, an expression of this length cannot make a huge number


async def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers, + - * / // % and parentheses, e.g. "41 - 17"
    """
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters, at most {_MAX_CHARS} are allowed")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ToolError("not an arithmetic expression") from error
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    raise ValueError(f"not arithmetic: {type(node).__name__}")


class CalculatorEnv(ToolEnvironment):
    """The policy may call `calculate` as often as it has turns; its final text is scored."""

    state_fields = ()

    def __init__(
        self, score: ScoreSpec = "exact_match", *, max_turns: int | None = None, tool_timeout_s: float = 30.0
    ) -> None:
        """The arguments are those of ToolEnvironment."""
        super().__init__((calculate,), score, max_turns=max_turns, tool_timeout_s=tool_timeout_s)
