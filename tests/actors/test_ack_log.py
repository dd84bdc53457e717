from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from asyncrl.actors.ack_log import AckLog
from tests.learner.tiny import random_trajectory


def test_a_line_that_a_power_cut_left_half_is_cut_off_and_numbers_go_on(tmp_path: Path) -> None:
    path, trajectory = tmp_path / "acks" / "actor-0.jsonl", random_trajectory(0, 0, np.random.default_rng(0))
    for _ in range(2):
        log = AckLog(path)
        log.write(trajectory)
        log.close()
        with path.open("a") as file:
            file.write('{"n": 7, "bra')
    AckLog(path).close()
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 1]
