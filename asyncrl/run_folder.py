"""Where everything of one run lies: `runs/<name>/`.

Sockets and weights in flight do not lie in it: a socket's path may have 107 bytes at most, and weights belong into
memory. Both live in folders that only their owner can read; `run.json` says where, and the end of the run removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.keys import Keys
from asyncrl.process import leftovers
from asyncrl.sockets import Endpoint

SOCKET_PATH_BYTES = 107
"""What fits into `sockaddr_un`."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """A new run folder, ready for the roles. Raises RunError when `path` already holds a run."""
        run = cls(path.absolute())
        run.path.mkdir(parents=True, exist_ok=True)
        try:
            (run.path / "run.json").open("x").close()
        except FileExistsError:
            raise RunError(
                f"{path} already holds a run: choose another launch.name, go on with --resume {path}, or remove it."
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
            raise RunError(f"{path} holds no run (no run.json in it): give the folder that `asyncrl launch` printed.")
        return run

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """One launcher at a time; the kernel lets go when it dies. Raises RunError when another one holds the run."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"{self.path} is in use by another launcher: stop that one, or choose another run."
                ) from None
            yield

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def buffer(self) -> Path:
        """The live ledger, unless `buffer.dir` says otherwise."""
        return self.path / "buffer"

    def ledger(self, config: Config) -> Path:
        """The live ledger's folder on the host where this is asked."""
        return Path(os.path.expandvars(config.buffer.dir)) if config.buffer.dir else self.buffer

    @property
    def acks(self) -> Path:
        """`<actor>.jsonl`: what each actor was told is stored; a witness for the audit."""
        return self.path / "acks"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def id(self) -> str:
        """Of this launch: the environment of its processes carries it as ASYNCRL_RUN."""
        return str(self.record()["id"])

    @property
    def sockets(self) -> Path:
        return Path(self.record()["sockets"])

    @property
    def rendezvous(self) -> Path:
        """The file at which the learner's ranks find each other; made anew for every start of them. Where roles may be
        on other hosts than the launcher, which removes it, it lies in what the hosts share."""
        return (self.private if self.record().get("host") else self.sockets) / "learner.ranks"

    @property
    def shm(self) -> Path:
        """Where weights are published: shared memory where the machine has it, else in the run folder."""
        return Path(self.record()["shm"])

    @property
    def private(self) -> Path:
        """The keys, and where roles listen, of a launch whose sockets are tcp (`launch.host`)."""
        return self.path / "private"

    def address(self, name: str) -> Endpoint:
        """Of a role that listens: `buffer`, `launcher`, `weights`. Raises RunError."""
        if host := self.record().get("host"):
            return Endpoint(name, announced=self.private / name, keys=Keys.load(self.private / "keys"), host=host)
        path = self.sockets / f"{name}.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
            raise RunError(f"{path} is too long for a socket ({SOCKET_PATH_BYTES} bytes): set TMPDIR to a short path.")
        return Endpoint(name, f"ipc://{path}")

    def load_config(self) -> Config:
        """Raises RunError for one that is damaged, or was written by another state of the code."""
        try:
            return Config.model_validate(yaml.safe_load(self.config.read_text()))
        except (yaml.YAMLError, ValueError) as error:
            said = " ".join(str(error).split())
            raise RunError(
                f"{self.config} cannot be read: {said:.300} Mend it, or use the asyncrl that wrote it."
            ) from error

    def save_config(self, config: Config) -> None:
        replace(self.config, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))

    def record(self) -> dict[str, Any]:
        """What `run.json` holds: id, started, sockets, shm, host, and the processes with pid and start time.

        Raises RunError when it holds nothing of the kind."""
        try:
            record: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        except ValueError as error:
            raise RunError(
                f"{self.path / 'run.json'} is no record of a run ({error}): its launch was cut off, by a full disk "
                "perhaps, before anything started. Remove the folder."
            ) from error
        return record

    def note(self, **values: Any) -> None:
        """Adds to `run.json`. One writer: the launcher."""
        self._write({**self.record(), **values})

    def open(self) -> None:
        """A new launch of this run: fresh folders for sockets and weights, a new id. No process of it may live."""
        self.remove_temporary()
        sockets = tempfile.mkdtemp(prefix="asyncrl-", dir=_short_folder())
        host = self.load_config().launch.host
        if host:
            self.private.mkdir(mode=0o700)
            Keys.new().save(self.private / "keys")
        record = {"id": uuid.uuid4().hex, "started": time.time(), "user": getpass.getuser(), "sockets": sockets}
        shm = self._new_shm()
        for folder in (Path(sockets), shm):
            leftovers.hold(folder)
        self._write({**record, "shm": str(shm), "host": host, "processes": {}})

    def remove_temporary(self) -> None:
        """Sockets, keys and weights in flight of a launch that is over."""
        shutil.rmtree(self.private, ignore_errors=True)
        text = (self.path / "run.json").read_text()
        for name in ("sockets", "shm") if text else ():
            folder = Path(json.loads(text)[name])
            leftovers.let_go(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def _new_shm(self) -> Path:
        memory = Path("/dev/shm")
        if memory.is_dir() and os.access(memory, os.W_OK):
            return Path(tempfile.mkdtemp(prefix=f"asyncrl-{os.getuid()}-", dir=memory))
        folder = self.path / "shm"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _write(self, record: Mapping[str, Any]) -> None:
        replace(self.path / "run.json", json.dumps(record, indent=2) + "\n")


def replace(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def _short_folder() -> str:
    """The folder for temporary files, or /tmp where that is too deep for a socket's path."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) < SOCKET_PATH_BYTES - 40 else "/tmp"
