"""The environment: a price list and a calculator as tools. An instance plays one episode."""

import asyncrl
from asyncrl.actors.envs.tool import ToolError

PRICES = {"ant": 17, "bee": 42, "cat": 65, "dog": 23, "eel": 91, "fox": 38, "owl": 54, "seal": 76, "toad": 12}
SIGNS = {"+": int.__add__, "-": int.__sub__}


class Shop(asyncrl.ToolEnvironment):
    """The policy may call tools as often as it has turns; the text of its first message without a call is scored."""

    def __init__(self, **options):
        super().__init__(tools=[lookup, calculate], **options)


# A function with type hints and a docstring is a tool. What it raises as a ToolError is told to the policy; any other
# exception fails the episode, which is then tried again and never becomes reward 0.
def lookup(key: str) -> str:
    """Look up the price of a thing.

    Args:
        key: its name
    """
    if key not in PRICES:
        raise ToolError(f"no key {key}")
    return str(PRICES[key])


def calculate(expression: str) -> str:
    """Work out a sum or a difference.

    Args:
        expression: two numbers and a sign, e.g. "41 - 17"
    """
    words = expression.split()
    if len(words) != 3 or words[1] not in SIGNS or not (words[0].isdigit() and words[2].isdigit()):
        raise ToolError("not a sum or a difference of two numbers")
    return str(SIGNS[words[1]](int(words[0]), int(words[2])))
