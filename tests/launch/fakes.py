"""Fake roles, and how to look at what is left of them."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from asyncrl.launch.processes import Role
from asyncrl.run_folder import RunFolder

FAKE = str(Path(__file__).with_name("fake_role.py"))


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids_of(run: RunFolder, name: str) -> list[int]:
    note = run.path / f"{name}.pids"
    return [int(line) for line in note.read_text().split()] if note.exists() else []


def fake(run: RunFolder, name: str, behaviour: str) -> Role:
    leader = "learner" if name.startswith("learner-") else ""
    launcher = str(run.sockets / "launcher.sock")
    return Role(name, (sys.executable, FAKE, str(run.path), name, behaviour, launcher), leader=leader)
