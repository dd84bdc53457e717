"""The score of an episode: a number for the policy's last text."""


def score(solution_str: str, ground_truth: str) -> float:
    """1 for the answer and nothing else, else 0. It may also take `data_source`, `extra_info`, `task` and `tokens`."""
    return float(solution_str.strip() == ground_truth)
