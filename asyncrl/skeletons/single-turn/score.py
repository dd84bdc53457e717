"""The score of an answer: a number, or several by name."""


def score(solution_str: str, ground_truth: str) -> dict[str, float]:
    """1 for the right number and nothing else; a little for a number at all, so that there is a way to the answer.

    `score` is the reward, the other numbers are metrics. Further parameters that it may have: `data_source`,
    `extra_info`, `task`, `tokens`.
    """
    answer = solution_str.strip()
    right = float(answer == ground_truth)
    return {"score": right + 0.1 * (answer.isdigit() and not right), "right": right}
