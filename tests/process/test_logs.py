from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from asyncrl.process.logs import last_error, tail, why_it_ended

ROLE = """
import sys
from asyncrl.errors import ConfigError, RunError
from asyncrl.process.role import play
def main():
    import logging
    logging.getLogger("learner").info("step 3")
    raise {error}
play("learner", main)
"""


def died(tmp_path: Path, error: str) -> tuple[int, Path]:
    log = tmp_path / "learner.log"
    with log.open("w") as file:
        done = subprocess.run([sys.executable, "-c", ROLE.format(error=error)], stderr=file, timeout=30, check=False)
    return done.returncode, log


def test_a_crash_is_told_by_its_exception(tmp_path: Path) -> None:
    code, log = died(tmp_path, "ZeroDivisionError('no tokens')")
    assert why_it_ended(log, code) == "exit code 1: ZeroDivisionError: no tokens"


def test_a_config_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    code, log = died(tmp_path, "ConfigError('learner.loss is 7: expected a name.')")
    assert code == 2
    assert last_error(log) == "learner.loss is 7: expected a name."
    assert "Traceback" not in log.read_text()


def test_a_run_error_is_exit_code_3(tmp_path: Path) -> None:
    code, log = died(tmp_path, "RunError('the disk is full.')")
    assert (code, last_error(log)) == (3, "the disk is full.")


def test_a_signal_is_named(tmp_path: Path) -> None:
    assert why_it_ended(tmp_path / "none.log", -9) == "killed by SIGKILL"


def test_the_tail_of_a_large_log_is_its_end(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {i}\n\n" for i in range(100_000)))
    assert tail(log, 2) == ["line 99998", "line 99999"]
