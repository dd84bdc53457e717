"""The score and the tasks, without a model: python test_score.py, or pytest."""

import json
from pathlib import Path

from score import score


def test_the_right_answer_and_nothing_else_is_1():
    assert score("59", "59")["score"] == 1
    assert score("59 63", "59")["score"] == 0
    assert 0 < score("63", "59")["score"] < 1


def test_every_task_can_be_solved():
    lines = (Path(__file__).parent / "tasks.jsonl").read_text().splitlines()
    tasks = [json.loads(line) for line in lines]
    assert all(score(task["ground_truth"], task["ground_truth"])["right"] == 1 for task in tasks)
    assert len({task["prompt"] for task in tasks}) == len(tasks)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"passed: {name}")
