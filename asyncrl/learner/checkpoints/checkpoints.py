"""Checkpoints: complete under their final name, or absent.

    checkpoints/step-000020/   hf/            weights and tokenizer, loadable by transformers (float32)
                               optimizer.pt   AdamW; learner.backend fsdp2: dcp/, the shards of model and AdamW;
                                              megatron: megatron/, whole moments in files of all ranks
                               critic/        the same of a critic (learner.critic), and head.pt; reference.pt, kl.json
                                              where the reference is refreshed, the KL term's weight steered
                               adapter/       learner.lora: what peft loads over the base; hf/ is merged then, and
                                              optimizer.pt or dcp/ is of the adapters alone
                               schedule.json  how many steps had no gradient, and so no place in the schedule; if any
                               rng.pt         torch's random state
                               batches.jsonl  every batch so far: number, outcome, each group's digest and weights, the
                                              digest of its teacher (learner.teacher), each demonstration's
                               state.json     version, batch, branch, threads; digests of the files above
                               buffer/        the buffer's own part: its ledger, the payloads still needed

The contents are copied at once and written in the background under a temporary name, flushed to the disk, and renamed
last. A process killed on the way leaves the previous checkpoint as the newest, and a folder that the next start
removes. One is written at a time, and the buffer keeps what two need, so the previous one stays usable.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.errors import RunError
from asyncrl.learner.checkpoints.background import Background
from asyncrl.learner.checkpoints.disk import disk_errors

_UNFINISHED = ".unfinished-"
_REMEDY = "lower learner.keep_checkpoints"
_STATE = "state.json"
_BATCHES = "batches.jsonl"
_BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class Done:
    """One batch of the learner's list: a record of what was trained that is independent of the ledger."""

    batch: int
    outcome: str
    """applied, guard, or skipped: this learner did not see it"""
    groups: dict[int, str]
    """Digest of each group: over the digests of its trajectories, and of its scores (`learner.teacher.scored_by`)."""
    weights: dict[int, list[float]] = field(default_factory=dict)
    """Mean importance weight of each trajectory over tokens that carry loss, by group, then by index in it"""
    teacher: str = ""
    """Digest of the teacher that scored it, if there was one"""
    demonstrations: list[str] = field(default_factory=list)
    """Digest of each demonstration, in training order"""


@dataclass(frozen=True, slots=True)
class State:
    """The learner's state without weights and optimizer."""

    version: int
    batch: int
    """The one wanted next"""
    branch: int
    threads: int
    """CPU threads; with another number results differ in the last bits"""
    ranks: int = 1
    """Processes; likewise"""

    @property
    def name(self) -> str:
        plain = f"step-{self.version:06d}"
        return plain if (self.batch, self.branch) == (self.version, 0) else f"{plain}-b{self.batch:06d}-br{self.branch}"


class Checkpoints:
    """The checkpoints of one run, in `folder`; one writer."""

    def __init__(self, folder: Path, keep: int, deadline_s: float = 1800.0) -> None:
        """`deadline_s`: seconds to wait for a checkpoint that is being written."""
        self.folder, self._keep = folder, keep
        self._writing = Background(deadline_s)
        self._completed: list[tuple[int, Path]] = []
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"{_UNFINISHED}*"):
            _remove(unfinished)

    def begin(
        self,
        state: State,
        done: list[Done],
        save: Callable[[Path], Callable[[], None]],
        announce: Callable[[Path], None],
    ) -> None:
        """Begins a checkpoint, which is written in the background, once the previous one is complete.

        `save` copies the contents of the folder that it is given, and returns the function that writes them; then
        `announce` lets the buffer add its part, as of this moment. Afterwards the oldest beyond `keep` are removed.
        Raises RunError when the disk is full, now or at the next call of any method. A checkpoint that exists already
        (its batches were redone) stays as it is.
        """
        self.settle()
        final = self.folder / state.name
        if final.exists():
            return
        import torch  # the audit reads lists without it

        unfinished = self.folder / f"{_UNFINISHED}{state.name}"
        with disk_errors(f"the checkpoint {final}", unfinished, _REMEDY):
            unfinished.mkdir()
            write = save(unfinished)
            torch.save(torch.get_rng_state(), unfinished / "rng.pt")
            lines = (json.dumps([d.batch, d.outcome, d.groups, d.weights, *_rest(d)]) for d in done)
            (unfinished / _BATCHES).write_text("".join(f"{line}\n" for line in lines))
            announce(unfinished)

        def finish() -> None:
            with disk_errors(f"the checkpoint {final}", unfinished, _REMEDY):
                write()
                self._finish(state, unfinished, final)

        self._writing.begin(finish)

    def write(
        self,
        state: State,
        done: list[Done],
        save: Callable[[Path], Callable[[], None]],
        announce: Callable[[Path], None],
    ) -> Path:
        """Begins a checkpoint and waits until it is complete."""
        self.begin(state, done, save, announce)
        self.settle()
        return self.folder / state.name

    def settle(self) -> None:
        """Waits for the checkpoint that is being written. Raises RunError when it could not be, or not in time."""
        self._writing.settle()

    def completed(self) -> list[tuple[int, Path]]:
        """Version and folder of the checkpoints that were completed since the last call."""
        if not self._writing.busy:
            self.settle()
        completed = []
        while self._completed:  # one by one: the thread may add to them meanwhile
            completed.append(self._completed.pop(0))
        return completed

    def _finish(self, state: State, unfinished: Path, final: Path) -> None:
        written = {p.relative_to(unfinished): p for p in sorted(unfinished.rglob("*")) if p.is_file()}
        files = {str(name): _digest(p) for name, p in written.items() if name.parts[0] != _BUFFER}
        content = {**asdict(state), "files": files}
        (unfinished / _STATE).write_text(json.dumps({**content, "digest": _digest_of(content)}, indent=1))
        _flush(unfinished)
        os.rename(unfinished, final)
        _flush_entry(self.folder)
        for old in complete(self.folder)[: -self._keep]:
            _remove(old)
        self._completed.append((state.version, final))


def complete(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    checkpoints = [p for p in folder.glob("step-*") if (p / _STATE).is_file()]
    return sorted(checkpoints, key=lambda p: (_place(p), p.name))


def read(path: Path) -> tuple[State, list[Done]]:
    """Verifies every file of the learner's part and restores torch's random state. Raises RunError when damaged."""
    import torch

    with _damaged(path):
        for name, digest in _read_state(path)["files"].items():
            _verify(path, name, digest)
        contents = read_list(path)
        torch.set_rng_state(torch.load(path / "rng.pt", weights_only=True))
    return contents


def read_list(path: Path) -> tuple[State, list[Done]]:
    """Verifies and reads the learner's list alone. Raises RunError when damaged."""
    with _damaged(path):
        state = _read_state(path)
        _verify(path, _BATCHES, state.pop("files")[_BATCHES])
        lines = [json.loads(line) for line in (path / _BATCHES).read_text().splitlines()]
        done = [Done(b, end, _by_group(groups), _by_group(weights), *rest) for b, end, groups, weights, *rest in lines]
    return State(**state), done


def _rest(done: Done) -> list[Any]:
    """What only some batches have: the teacher's digest, and behind it those of demonstrations."""
    if done.demonstrations:
        return [done.teacher, done.demonstrations]
    return [done.teacher] if done.teacher else []


def changed_files(path: Path) -> list[str]:
    """Files of the learner's part that are not what was written. Raises RunError when the state cannot be read."""
    with _damaged(path):
        files = _read_state(path)["files"].items()
        return [name for name, digest in files if not (path / name).is_file() or _digest(path / name) != digest]


def group_digests(trajectory_groups: list[int], digests: tuple[str, ...]) -> dict[int, str]:
    """One digest per group, over the digests of its trajectories, whatever their order."""
    members: dict[int, list[str]] = {}
    for group, digest in zip(trajectory_groups, digests, strict=True):
        members.setdefault(group, []).append(digest)
    return {g: hashlib.blake2b("".join(sorted(d)).encode(), digest_size=16).hexdigest() for g, d in members.items()}


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"checkpoint {path} is damaged ({error}): move it away, and --resume takes the one before it."
        ) from error


def _place(path: Path) -> tuple[int, int]:
    with _damaged(path):
        state: dict[str, Any] = json.loads((path / _STATE).read_text())
        return int(state["branch"]), int(state["batch"])


def _read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / _STATE).read_text())
    if state.pop("digest") != _digest_of(state):
        raise ValueError(f"{_STATE} is not what was written")
    return state


def _verify(path: Path, name: str, digest: str) -> None:
    if _digest(path / name) != digest:
        raise ValueError(f"{name} is not what was written")


def _by_group(by_text: dict[str, Any]) -> dict[int, Any]:
    return {int(group): value for group, value in by_text.items()}


def _remove(path: Path) -> None:
    # Renamed first, so that a kill on the way leaves no partial folder under a checkpoint's name, and so that a process
    # that still writes into it (the buffer, for a learner that has died) no longer finds it.
    doomed = path.with_name(f"{_UNFINISHED}{path.name}.{os.getpid()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _flush(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
