"""Where a run begins: with the model of its config, or with a checkpoint of an earlier run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from asyncrl.buffer.evaluations.places import place_of
from asyncrl.buffer.ledger.witnessed import Witnessed, read_witnessed
from asyncrl.config import Config
from asyncrl.config.demonstrations import supervised
from asyncrl.config.loading import Sourced, fields, load
from asyncrl.config.resuming import FIELDS, differences, settings
from asyncrl.config.teacher import scored_by_servers, words_scored
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import check_disk, refuse_live
from asyncrl.run_folder import RunFolder, replace

PLACE = ("launch.name", "launch.runs_dir")
"""Fields that say where the run folder is; a fork has its own."""
MADE_WITH: Mapping[str, str] = {
    "learner.backend": "the checkpoints were written",
    "learner.lora": "the checkpoints were written",
}
"""What was made with the former value of a field that cannot change; else `LEDGER`."""
LEDGER = "what the ledger holds was drawn and played"


@dataclass(frozen=True, slots=True)
class Origin:
    """A new run by default. Raises ConfigError for fields that contradict each other."""

    resume: Path | None = None
    """Continue the run in this folder, from its last checkpoint."""
    fork: Path | None = None
    """Begin a new run from a checkpoint of the run in this folder."""
    fresh: bool = False
    """With `resume`: do not redo the batches recorded after the checkpoint, but begin a new branch."""
    at_step: int | None = None
    """With `fresh` or `fork`: the training step of the checkpoint; None: the newest one."""

    def __post_init__(self) -> None:
        if self.resume is not None and self.fork is not None:
            raise ConfigError("--resume and --fork cannot go together: continue the run, or begin a new one from it.")
        if self.fresh and self.resume is None:
            raise ConfigError("--fresh goes with --resume RUN: it begins a new branch of that run's history.")
        if self.at_step is not None and not (self.fresh or self.fork):
            raise ConfigError(
                "--at-step goes with --resume RUN --fresh, or with --fork RUN: what came after that step is not redone."
            )

    @property
    def earlier(self) -> RunFolder | None:
        """The run that is resumed or forked. Raises RunError when the folder holds none."""
        folder = self.resume or self.fork
        return None if folder is None else RunFolder.existing(folder)

    def load(self, file: Path | None, flags: Mapping[str, Any]) -> Sourced[Config]:
        """The configuration: `file`, or that of the earlier run, with `flags` on top. Raises ConfigError."""
        if file is not None and (self.resume or self.fork):
            raise ConfigError(
                "--config cannot go with --resume or --fork: the run keeps the config in its folder. Flags change it."
            )
        if (earlier := self.earlier) is None:
            return load(Config, file, flags)
        earlier.load_config()  # its errors speak of a run
        flags = {"launch.name": None, **flags} if self.fork else flags  # a fork needs a new name
        return load(Config, earlier.config, flags)

    def check(self, config: Config) -> Path | None:
        """The checkpoint of a fork or of a new branch, also of one that an earlier launch was to begin. Raises
        ConfigError when there is none, and when `config` changes what the earlier run has fixed; raises RunError."""
        if (earlier := self.earlier) is None:
            return None
        checkpoint = checkpoint_at(earlier, self.at_step) if self.fork or self.fresh else earlier.fresh_from()
        before = earlier.load_config()
        if self.fork is not None:
            if config.buffer.dir is not None and config.buffer.dir == before.buffer.dir:
                raise ConfigError(
                    f"buffer.dir is {config.buffer.dir!r}, which holds the ledger of {earlier.path}: give another."
                )
            _check_fixed(before, config, "--fork", besides=("buffer.dir",))
            _check_kind(before, config, "--fork")
            _check_words(before, config, "--fork")
        else:
            _check_place(earlier, before, config)
            _check_fixed(before, config, "--resume")
            _check_kind(before, config, "--resume")
            _check_words(before, config, "--resume")
        return checkpoint

    def warnings(self, config: Config) -> list[str]:
        """Names the branch that is still to begin, else the changed fields that decide the result of a redone step."""
        if self.resume is None or self.fresh:
            return []
        from asyncrl.learner.checkpoints.checkpoints import complete

        run = RunFolder.existing(self.resume)
        if (checkpoint := run.fresh_from()) is not None:
            return [
                f"an earlier launch (--fresh, --fork) ended before its learner began the new branch at "
                f"{checkpoint.name}: it begins now. To redo what is recorded after it instead, remove {run.fresh}."
            ]
        changed = differences(settings(run.load_config()), settings(config))
        newest = complete(run.checkpoints)[-1:]
        where = f"the checkpoint {newest[0].name}" if newest else "the initial model"
        return [
            f"{'; '.join(changed)}. Training continues with them from {where}. If steps after it are recorded, they "
            "would give other weights when they are redone: a new branch begins there instead."
        ] * bool(changed)

    def open(self, config: Config, stem: str, checkpoint: Path | None) -> RunFolder:
        """The run folder: the resumed one, or a new one, which for a fork holds a copy of the checkpoint, ledger
        included. Raises RunError."""
        earlier = self.earlier
        if earlier is not None and self.resume is not None:
            return earlier
        run = new_folder(config, stem if earlier is None else earlier.name)
        if earlier is not None and checkpoint is not None:
            inherit(run, earlier, checkpoint)
        return run


def new_folder(config: Config, stem: str) -> RunFolder:
    """A folder named `launch.name`, else `stem` and the time. Raises RunError when it exists."""
    folder = Path(config.launch.runs_dir)
    check_disk(folder)
    if config.launch.name is not None:
        path = folder / config.launch.name
        if (path / "run.json").exists():
            refuse_live(RunFolder.existing(path))
        return RunFolder.create(path, config)
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    taken = sum(1 for _ in folder.glob(f"{name}*"))
    return RunFolder.create(folder / (f"{name}-{taken + 1}" if taken else name), config)


def checkpoint_at(run: RunFolder, step: int | None) -> Path:
    """The checkpoint after training step `step`; None: the newest. Raises ConfigError when there is none."""
    from asyncrl.learner.checkpoints.checkpoints import complete, read_list

    paths = complete(run.checkpoints)
    if not paths:
        raise ConfigError(f"{run.path} has no checkpoint: nothing to begin from. Start a new run.")
    if step is None:
        return paths[-1]
    by_step = {read_list(path)[0].version: path for path in paths}
    if step not in by_step:
        steps = ", ".join(map(str, sorted(by_step)))
        raise ConfigError(f"--at-step is {step}, and there is no such checkpoint: expected one of {steps}.")
    return by_step[step]


def _check_place(run: RunFolder, before: Config, config: Config) -> None:
    for field in PLACE:
        if (was := attrgetter(field)(before)) != (now := attrgetter(field)(config)):
            raise ConfigError(
                f"{field} cannot change with --resume: it was {was!r}, now {now!r}, and the run stays in {run.path}. "
                "Leave it out, or begin a new run from this one's checkpoint with --fork."
            )


def _check_fixed(before: Config, config: Config, option: str, besides: tuple[str, ...] = ()) -> None:
    for field, _ in fields(Config):
        if field not in FIELDS["refused"] or field in (*PLACE, *besides):
            continue
        if (was := attrgetter(field)(before)) != (now := attrgetter(field)(config)):
            made = next((what for name, what in MADE_WITH.items() if f"{field}.".startswith(f"{name}.")), LEDGER)
            raise ConfigError(
                f"{field} cannot change with {option}: it was {was!r}, now {now!r}, and {made} with the former. Leave "
                "it out, or start a new run from the weights: --config FILE --model.path RUN/checkpoints/STEP/hf."
            )


def _check_kind(before: Config, config: Config, option: str) -> None:
    """A ledger holds batches of groups or of demonstrations alone, and its equation is of one kind."""
    if supervised(before) != supervised(config):
        raise ConfigError(
            f"learner.loss cannot change between sft and a policy loss with {option}: it was {before.learner.loss!r}, "
            f"now {config.learner.loss!r}, and batches hold demonstrations alone under the one and groups under the "
            "other; start a new run from the weights: --config FILE --model.path RUN/checkpoints/STEP/hf."
        )


def _check_words(before: Config, config: Config, option: str) -> None:
    """Stored scores have as many words a token as their servers were asked for."""
    if scored_by_servers(config) and (now := words_scored(config)) > (was := words_scored(before)):
        raise ConfigError(
            f"learner.teacher.over and learner.teacher.k ask for {now} words of each token, and the scores that the "
            f"ledger holds have {was}: the number cannot rise with {option}. Leave them as they were, or start a new "
            "run from the weights: --config FILE --model.path RUN/checkpoints/STEP/hf."
        )


def inherit(run: RunFolder, source: RunFolder, checkpoint: Path) -> None:
    """Gives the folder of a fork the checkpoint, ledger included, and the witnesses of what that ledger holds.

    Whatever is killed on the way, `fresh` says that it is a fork. Raises RunError if the checkpoint's ledger cannot
    be read."""
    replace(run.fresh, checkpoint.name)
    held = read_witnessed(checkpoint)
    run.inherit_configs(source)
    inherit_logs(source.acks, run.acks, held)
    if source.score_logs.is_dir():
        run.score_logs.mkdir()
        inherit_logs(source.score_logs, run.score_logs, held)
        if source.teacher.is_file():  # it is not there before a server has answered
            shutil.copyfile(source.teacher, run.teacher)
    unfinished = run.checkpoints / f".unfinished-{checkpoint.name}"
    shutil.copytree(checkpoint, unfinished)
    unfinished.rename(run.checkpoints / checkpoint.name)


def inherit_logs(source: Path, target: Path, held: Witnessed) -> None:
    """Copies the logs of actors or scorers, each up to the last line that the checkpoint's ledger has something of."""
    for log in sorted(source.glob("*.jsonl")):
        whole = [line + b"\n" for line in log.read_bytes().split(b"\n")[:-1]]
        if lines := covered(whole, held, log.stem):
            (target / log.name).write_bytes(b"".join(lines))


def covered(lines: Sequence[bytes], held: Witnessed, actor: str) -> Sequence[bytes]:
    """The log of `actor` up to the last line that the ledger has something of, or was told of. What the actor wrote
    later belongs to the source alone: it never was in the new run's ledger, and so it is not lost."""
    last = max((n for n, line in enumerate(lines, 1) if _is_held(line, held, held.lines.get(actor, -1))), default=0)
    return lines[:last]


def _is_held(line: bytes, held: Witnessed, named: int) -> bool:
    """Whether the ledger has what this line says, or names it or a later one. `named`: the last that it names."""
    try:
        fields: dict[str, Any] = json.loads(line)
        if fields["n"] <= named:
            return True
        if "stored" in fields:
            said = fields["stored"]
            return (said["group"], said["attempt"], said["digest"]) in held.scores
        if "turn" in fields:
            said = fields["turn"]
            names = ("branch", "group", "index", "attempt", "number", "form", "tokens")
            return tuple(said[name] for name in names) in held.turns
        if "put" in fields:  # of a trajectory and of scores, the ledger names the line
            said = fields["put"]
            if "trajectories" in said:
                return False
            return (*place_of(said["group"]), said["index"], said["digest"]) in held.results
        return (fields["branch"], fields["group"], fields["index"], fields["digest"]) in held.trajectories
    except (ValueError, KeyError, TypeError):
        return False
