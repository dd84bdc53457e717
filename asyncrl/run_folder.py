"""The folder that holds everything of one run: `runs/<name>/`.

Sockets and weights in flight are elsewhere: the path of a socket may have at most 107 bytes, and weights belong in
memory. Both are in folders that only their owner can read; `run.json` names them, and the end of the run removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import platform
import shlex
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl import redaction
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.keys import Keys
from asyncrl.process import leftovers
from asyncrl.run_paths import RunPaths
from asyncrl.sockets import Endpoint

SOCKET_PATH_BYTES = 107
"""Length of a path that fits into `sockaddr_un`."""


BEST = "best.json"
"""Says which export is the best, in the folder of exports."""


def export_name(of: tuple[int, int]) -> str:
    """The folder of the export of (branch, version).

    >>> export_name((0, 20)), export_name((1, 20))
    ('step-000020', 'step-000020-br1')
    """
    return f"step-{of[1]:06d}" + (f"-br{of[0]}" if of[0] else "")


@dataclass(frozen=True, slots=True)
class RunFolder(RunPaths):
    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """A new run folder, ready for the roles. Raises RunError when `path` already holds a run."""
        run = cls(path.absolute())
        run.path.mkdir(parents=True, exist_ok=True)
        try:
            (run.path / "run.json").open("x").close()
        except FileExistsError:
            raise RunError(
                f"{path} already holds a run: choose another launch.name, go on with --resume "
                f"{shlex.quote(str(path))}, or remove it."
            ) from None
        for folder in (run.logs, run.checkpoints, run.buffer, run.acks, run.plots):
            folder.mkdir(exist_ok=True)
        run.save_config(config)
        run.open()
        return run

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """Raises RunError when there is no run at `path`."""
        run = cls(path.absolute())
        if not (run.path / "run.json").is_file():
            remedy = "give the folder that `asyncrl launch` printed"
            if (above := next((f for f in run.path.parents[:3] if (f / "run.json").is_file()), None)) is not None:
                remedy = f"it is part of the run {above}, give that"
            raise RunError(f"{path} holds no run (no run.json in it): {remedy}.")
        return run

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the run for one launcher; the kernel unlocks it when that dies. Raises RunError when it is locked."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"{self.path} is in use by another launcher: stop that one, or choose another run."
                ) from None
            yield

    def fresh_from(self) -> Path | None:
        """The checkpoint at which a new branch is still to begin. Raises RunError if it is not there."""
        if not self.fresh.is_file():
            return None
        checkpoint = self.checkpoints / self.fresh.read_text().strip()
        if not (checkpoint / "state.json").is_file():
            raise RunError(
                f"{self.fresh} says that a new branch is to begin at {checkpoint}, which is no checkpoint. After a "
                "--fork that was killed while it copied: remove the folder, and fork again. Else name another one with "
                "--fresh --at-step K, or remove the file to redo what is recorded."
            )
        return checkpoint

    @property
    def id(self) -> str:
        """Identifies this launch; the environment of its processes carries it as ASYNCRL_RUN."""
        return str(self.record()["id"])

    @property
    def sockets(self) -> Path:
        return Path(self.record()["sockets"])

    @property
    def rendezvous(self) -> Path:
        """The file through which the learner's ranks find each other, created at every start of them; where they are on
        several nodes it holds the address of rank 0. The launcher removes it; where roles may run on other hosts it is
        in the folder that all hosts share."""
        return (self.private if self.record().get("host") else self.sockets) / "learner.ranks"

    @property
    def shm(self) -> Path:
        """Folder of published weights: in shared memory where the machine has it, else in the run folder."""
        return Path(self.record()["shm"])

    @property
    def private(self) -> Path:
        """The keys and the addresses of listening roles, for a launch over TCP (`launch.host`)."""
        return self.path / "private"

    def address(self, name: str) -> Endpoint:
        """The address of a listening role: `buffer`, `launcher` or `weights`. Raises RunError."""
        if host := self.record().get("host"):
            keys = Keys.load(self.private / "keys")
            return Endpoint(name, announced=self.private / name, keys=keys, host=host, folder=self.sockets)
        path = self.sockets / f"{name}.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
            raise RunError(f"{path} is too long for a socket ({SOCKET_PATH_BYTES} bytes): set TMPDIR to a short path.")
        return Endpoint(name, f"ipc://{path}")

    def key(self, purpose: str) -> bytes:
        """What only processes of this launch know, another one for each purpose; empty where no keys are needed, on one
        host. Raises RunError."""
        return Keys.load(self.private / "keys").derived(purpose) if self.record().get("host") else b""

    def load_config(self) -> Config:
        """Its secrets are hidden in what this process writes from now on. Raises RunError for a damaged config, and for
        one written by an incompatible version of the code."""
        return _load(self.config)

    def save_config(self, config: Config) -> None:
        """Writes the config, readable by its owner only if it holds a secret. One that differs from it stays under
        `configs/`: the ledger was made with both."""
        values = config.model_dump(mode="json")
        redaction.hide(values)
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        if self.config.exists() and (before := self.config.read_text()) != text:
            self._keep_config(before)
        replace(self.config, text, mode=0o600 if any(redaction.given_in_clear(values)) else None)

    def earlier_configs(self) -> list[Config]:
        """The configs with which the run was continued before, oldest first; hides secrets and raises RunError, as
        `load_config`."""
        return [_load(path) for path in sorted(self.configs.glob("*.yaml"))]

    def inherit_configs(self, run: RunFolder) -> None:
        """Keeps the configs of the run whose ledger this one continues."""
        for path in (*sorted(run.configs.glob("*.yaml")), run.config):
            self._keep_config(path.read_text())

    def _keep_config(self, text: str) -> None:
        self.configs.mkdir(exist_ok=True)
        replace(self.configs / f"{len(list(self.configs.glob('*.yaml'))):04d}.yaml", text, mode=0o600)

    @property
    def ended(self) -> bool:
        """Whether this launch has written its summary; that of an earlier one may still be there."""
        return self.summary.is_file() and self.summary.stat().st_mtime >= self.record()["started"]

    def record(self) -> dict[str, Any]:
        """The contents of `run.json`: id, started, folder, sockets, shm, host, launched_on, and the processes with
        pid and start time. `folder` is the run folder's path and inode, `launched_on` the name of the launcher's host.

        Raises RunError when the file is damaged."""
        file = self.path / "run.json"
        try:
            record: Any = json.loads(file.read_text())
        except ValueError as error:
            raise RunError(
                f"{file} holds no record of a run ({error}): its launch was interrupted, perhaps by a full disk, "
                "before anything started. Remove the folder."
            ) from error
        if not isinstance(record, dict) or not {"id", "started", "sockets", "shm", "processes"} <= record.keys():
            raise RunError(
                f"{file} holds no record of a run: another program wrote it, or it was changed. Give the folder that "
                "`asyncrl launch` printed."
            )
        return record

    def read_summary(self) -> dict[str, Any]:
        """The contents of `summary.json`; empty if it is not there. Raises RunError when the file is damaged."""
        try:
            summary: dict[str, Any] = json.loads(self.summary.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise RunError(
                f"{self.summary} cannot be read ({error}): remove it; asyncrl launch --resume writes it again."
            ) from error
        return summary

    @property
    def copied_from(self) -> Path | None:
        """The folder of which this one is a copy, if no launch of its own has begun: what `run.json` names is then the
        original's. A folder that was moved is none, and keeps its inode."""
        if not (self.path / "run.json").stat().st_size:
            return None
        path, inode = self.record().get("folder", ("", 0))
        copied = path and Path(path) != self.path.resolve() and inode != self.path.stat().st_ino
        return Path(path) if copied else None

    def note(self, **values: Any) -> None:
        """Updates `run.json`; only the launcher may call it."""
        self._write({**self.record(), **values})

    def open(self) -> None:
        """Begins a new launch of this run, with new folders for sockets and weights and a new id. No process of the run
        may live."""
        if self.copied_from is None:
            self.remove_temporary()
        for within in (self.private, self._shm_within):  # what lies in a copy is its own, whatever `run.json` names
            shutil.rmtree(within, ignore_errors=True)
        sockets = tempfile.mkdtemp(prefix="asyncrl-", dir=_short_folder())
        host = self.load_config().launch.host
        if host:
            self.private.mkdir(mode=0o700)
            Keys.new().save(self.private / "keys")
        record = {"id": uuid.uuid4().hex, "started": time.time(), "user": _user(), "sockets": sockets}
        shm = self._new_shm()
        for folder in (Path(sockets), shm):
            leftovers.lock(folder)
        place = str(self.path.resolve()), self.path.stat().st_ino
        record |= {"folder": place, "shm": str(shm), "host": host, "launched_on": platform.node()}
        self._write(record | {"processes": {}})

    def remove_temporary(self) -> None:
        """Removes sockets, keys and weights in flight of a launch that is over."""
        shutil.rmtree(self.private, ignore_errors=True)
        text = (self.path / "run.json").read_text()
        for name in ("sockets", "shm") if text else ():
            folder = Path(json.loads(text)[name])
            leftovers.release(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def _new_shm(self) -> Path:
        memory = Path("/dev/shm")
        if memory.is_dir() and os.access(memory, os.W_OK):
            return Path(tempfile.mkdtemp(prefix=f"asyncrl-{os.getuid()}-", dir=memory))
        self._shm_within.mkdir(mode=0o700)
        return self._shm_within

    @property
    def _shm_within(self) -> Path:
        """The folder of published weights where the machine has no shared memory."""
        return self.path / "shm"

    def _write(self, record: Mapping[str, Any]) -> None:
        replace(self.path / "run.json", json.dumps(record, indent=2) + "\n")


def _user() -> str:
    """The name of this process's user, or its number: in a container, a number may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # Python 3.13 raises OSError
        return str(os.getuid())


def _load(path: Path) -> Config:
    """Hides the config's secrets. Raises RunError."""
    try:
        config = Config.model_validate(yaml.safe_load(path.read_text()))
    except FileNotFoundError as error:
        raise RunError(
            f"{path} is missing, so that nothing says what the run was to do: copy the whole run folder, or put the "
            "file back (`asyncrl launch --dry-run` prints it)."
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{path} cannot be read: {reason:.300} Correct it, or use the asyncrl that wrote it.") from error
    redaction.hide(config.model_dump(mode="json"))
    return config


def replace(path: Path, text: str, mode: int | None = None) -> None:
    """Writes a file so that a reader sees the old text or the new one, never a mixture. `mode`: its rights."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(0o666 if mode is None else mode)
    temporary.write_text(text)
    temporary.replace(path)


def _short_folder() -> str:
    """The folder for temporary files, or /tmp where its path is too long for a socket."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) < SOCKET_PATH_BYTES - 40 else "/tmp"
