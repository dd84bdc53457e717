"""The tasks: each is made from a random generator, which is seeded by the number of the task."""

from random import Random

THINGS = ("ant", "bee", "cat", "dog", "eel", "fox", "owl", "seal", "toad")
PRICES = {"ant": 17, "bee": 42, "cat": 65, "dog": 23, "eel": 91, "fox": 38, "owl": 54, "seal": 76, "toad": 12}


def task(rng: Random) -> dict[str, str]:
    """The agent gets this mapping. asyncrl itself reads `prompt` only; the other keys are yours."""
    first, second = rng.sample(THINGS, 2)
    sign = rng.choice("+-")
    answer = PRICES[first] + PRICES[second] if sign == "+" else PRICES[first] - PRICES[second]
    return {"prompt": f"What is {first} {sign} {second}?", "ground_truth": str(answer)}
