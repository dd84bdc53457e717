"""`asyncrl replay`: train on the recorded batches again, without actors, and compare the weights bit by bit.

    checkpoint K (or the initial model) ─> batch b from the payloads ─> train_step ─> weights of version v
                                                                                        │
                    the digest under which v was published, the checkpoint of v  <──compared

All training code is the learner's own. On a CPU, at the recorded number of threads, every version must be equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from asyncrl.audit.checks.stored.scores import read_scores
from asyncrl.audit.ledger import BatchRow, LedgerRows
from asyncrl.audit.payloads import PayloadDiffers, PayloadFiles, ReadPayload, decoded
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.client.messages import Demonstration
from asyncrl.config import Config, resuming
from asyncrl.config.teacher import scored_by_servers, words_scored
from asyncrl.data.demonstrations import Demonstrations, open_demonstrations
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.__main__ import compute_alike
from asyncrl.learner.backends.hf.moving import FILE as AVERAGE
from asyncrl.learner.backends.protocol import Backend
from asyncrl.learner.batch import Batch, flatten, hinted
from asyncrl.learner.batch.hints import HintsOf
from asyncrl.learner.build import builder_of, objective_of
from asyncrl.learner.checkpoints.checkpoints import complete, read, read_list
from asyncrl.learner.demonstrations import Rendered
from asyncrl.learner.distillation.identity import recorded, refuse_another
from asyncrl.learner.hints import HintRows
from asyncrl.learner.trainer import Trainer
from asyncrl.model import load_folder
from asyncrl.run_folder import RunFolder
from asyncrl.weights.local.shm import ShmPublisher
from asyncrl.wire import WireError
from asyncrl.wire.teacher_scores import GroupScores


@dataclass(frozen=True, slots=True)
class Replayed:
    """The weights after one replayed training step."""

    step: int
    batch: int | None
    """None: the initial weights."""
    compared: Mapping[str, bool]
    """Whether they equal the recorded weights, by record: `published`, or the name of a checkpoint."""
    outcome: str

    @property
    def identical(self) -> bool:
        """Whether no comparison failed."""
        return self.outcome == "applied" and all(self.compared.values())

    def __str__(self) -> str:
        results = ", ".join(f"{name}: {'identical' if same else 'DIFFERENT'}" for name, same in self.compared.items())
        ended = "" if self.outcome == "applied" else f"; it ended as {self.outcome}, recorded as applied"
        made_by = "start" if self.batch is None else f"batch {self.batch}"
        return f"step {self.step:<6} {made_by:<12} {results or 'nothing to compare with'}{ended}"


@dataclass(frozen=True, slots=True)
class Available:
    """The batches before the first whose payloads are not all available."""

    batches: list[BatchRow]
    why: str
    """Why the next batch cannot be replayed; empty at the end of the run."""
    damaged: bool
    """Whether a payload that should be available is missing or changed."""


def replay(run: RunFolder, *, from_step: int = 0, to_step: int | None = None) -> int:
    """Print a line per step. Returns the exit code: 0 if every compared version is identical and no payload is damaged.

    Raises ConfigError for a step without checkpoint, RunError if nothing can be compared.
    """
    config = run.load_config()
    folder = run.ledger(config)
    ledger = read_ledger(folder)
    checkpoints = on_the_line(run, ledger)
    _check_step(checkpoints, from_step)
    batches = [b for b in ledger.line if b.outcome == "applied" and b.version >= from_step]
    batches = [b for b in batches if to_step is None or b.version < to_step]
    with closing(PayloadFiles(folder / "payloads")) as payloads:
        available = _available(config, ledger, batches, payloads.read)
        print(_described(available, batches))
        taught = partial(_trainer, teacher=recorded(run.teacher))
        steps = replayed(config, ledger, available.batches, payloads.read, checkpoints, from_step, taught)
        results = list(_printed(steps))
    if not available.batches and results[-1].identical:
        raise _nothing(available, from_step, [step for step in sorted(checkpoints) if step != from_step])
    identical, verdict = _verdict(results, available)
    print(f"replay: {verdict}")
    return 0 if identical else 1


def _printed(results: Iterator[Replayed]) -> Iterator[Replayed]:
    for result in results:
        print(result, flush=True)
        yield result


def _nothing(available: Available, from_step: int, others: list[int]) -> RunError:
    remedy = f". There are other checkpoints: --from-step {', '.join(map(str, others))}" if others else ""
    why = available.why or "no later step is recorded"
    return RunError(f"nothing can be replayed from step {from_step} on: {why}{remedy}")


def _verdict(results: list[Replayed], available: Available) -> tuple[bool, str]:
    """Whether the replay is identical, and the sentence that says so."""
    if not (last := results[-1]).identical:
        cause = " (model.path holds another model than the run began with)" if last.step == 0 else ""
        return False, f"DIFFERENT from step {last.step} on{cause}"
    if available.damaged:
        return False, f"DIFFERENT: {available.why}"
    compared = sum(len(result.compared) for result in results)
    return True, f"{len(available.batches)} steps, {compared} comparisons, every one bit-identical"


def replayed(
    config: Config,
    ledger: LedgerRows,
    batches: list[BatchRow],
    read_payload: ReadPayload,
    checkpoints: Mapping[int, Path],
    from_step: int,
    trainer_of: Callable[[Config], Trainer],
) -> Iterator[Replayed]:
    """Yields the initial weights (checkpoint `from_step`, or the initial model), then those after each batch.

    Ends at the first that differ, since all later ones would.
    """
    under = [_under(config, ledger, batch) for batch in batches]
    config = under[0] if under else config
    trainer, data = trainer_of(config), open_demonstrations(config)
    if from_step > 0:
        read(checkpoints[from_step])
        trainer.load(checkpoints[from_step])

    initial = Replayed(from_step, None, _compared(trainer.backend, ledger, checkpoints, from_step), "applied")
    yield initial
    for batch, then in zip(batches, under, strict=True) if initial.identical else ():
        trainer, config = _continued(trainer, config, then, trainer_of), then
        demonstrations = shown(ledger, batch, data)
        groups = partial(rebuilt, config, ledger, batch, read_payload, trainer.hints_of)
        rows = trainer.combined(groups, demonstrations)
        result = trainer.train(rows, batch.version)
        same = _compared(trainer.backend, ledger, checkpoints, batch.version_after)
        after = Replayed(batch.version_after, batch.b, same, result.outcome)
        yield after
        if not after.identical:
            return


def _compared(backend: Backend, ledger: LedgerRows, checkpoints: Mapping[int, Path], version: int) -> dict[str, bool]:
    """Whether the weights are those recorded of this version, by record."""
    made_by = next((b for b in ledger.line if b.version_after == version and b.outcome == "applied"), None)
    published = ledger.published.get((made_by.branch if made_by else 0, version))
    same = {} if published is None else {"published": _digest(backend) == published}
    if version in checkpoints:
        same[checkpoints[version].name] = _same(backend, checkpoints[version])
    return same


def _under(config: Config, ledger: LedgerRows, batch: BatchRow) -> Config:
    """The configuration with the settings that the batch was trained with."""
    start = ledger.trained_by(batch.serial)
    return config if start is None else resuming.under(config, json.loads(start["settings"]))


def _trainer(config: Config, teacher: str = "") -> Trainer:
    """`teacher`: the digest of the run's. Raises ConfigError for several ranks, RunError for another teacher."""
    if config.learner.ranks > 1:
        raise ConfigError(
            f"learner.ranks is {config.learner.ranks}: a replay is one process, whose weights equal those of several "
            "only up to rounding. `asyncrl audit` checks the account of any run."
        )
    compute_alike(config)
    build = builder_of(config)
    trainer = Trainer(config, build(config), objective_of(config), build, Rendered.of(config), HintRows.of(config))
    refuse_another(teacher, trainer.teacher, config.learner.teacher.path, "recorded in its folder")
    return trainer


def _continued(trainer: Trainer, before: Config, config: Config, trainer_of: Callable[[Config], Trainer]) -> Trainer:
    """The trainer, or, under other settings, one that goes on where it is, as a learner does that resumes."""
    if resuming.settings(before) == resuming.settings(config):
        return trainer
    with TemporaryDirectory(prefix="asyncrl-replay-") as folder:
        trainer.save(Path(folder))
        state = torch.get_rng_state()
        other = trainer_of(config)
        torch.set_rng_state(state)
        other.load(Path(folder))
    return other


def shown(ledger: LedgerRows, batch: BatchRow, data: Demonstrations | None) -> list[Demonstration]:
    """The demonstrations of a batch, read again from their files. Raises RunError if they have changed."""
    rows = ledger.demonstrations.get(batch.serial, ())
    if data is None:
        return []
    return [Demonstration(r.draw, data.chats.where(r.row), r.digest, data.chats.chat(r.row)) for r in rows]


def rebuilt(
    config: Config, ledger: LedgerRows, batch: BatchRow, read_payload: ReadPayload, hints_of: HintsOf | None = None
) -> Batch:
    """The batch as the learner received it, from the payloads. Raises PayloadDiffers."""
    groups = [ledger.groups[number] for number in batch.groups]
    members = [(group, row) for group in groups for row in ledger.members[group.number]]
    masked = config.buffer.over_age == "mask"
    trajectories = [decoded(group, row, read_payload) for group, row in members]
    flat = flatten(
        trajectories,
        batch.groups,
        max(0, batch.version - batch.bound) if masked else None,
        [group.weight for group, _ in members],
        greedy_baseline=config.learner.greedy_baseline,
        loss_weights={one.group: one.weight for one in batch.replay.drawn},
        scores=rescored(config, ledger, batch, read_payload),
        words=words_scored(config),
    )
    return hinted(flat, trajectories, batch.groups, hints_of)


def rescored(config: Config, ledger: LedgerRows, batch: BatchRow, read_payload: ReadPayload) -> list[GroupScores]:
    """The scores of a teacher on servers with which the batch took its groups. Raises PayloadDiffers."""
    if not scored_by_servers(config):
        return []
    rows = {row["grp"]: row for row in ledger.tables["scores"]}
    found = []
    for number in batch.groups:
        try:
            scores = read_scores(rows[number], read_payload)
        except (KeyError, WireError, FileNotFoundError) as error:
            raise PayloadDiffers(f"the scores of group {number} are not there: {error}") from error
        if ledger.scores_used.get((batch.serial, number)) != (scores.digest(),):
            raise PayloadDiffers(f"batch {batch.b} took group {number} with other scores than are stored")
        found.append(scores)
    return found


def on_the_line(run: RunFolder, ledger: LedgerRows) -> dict[int, Path]:
    """The checkpoints on the recorded line, by version."""
    checkpoints = {}
    for path in complete(run.checkpoints):
        state, _ = read_list(path)
        if state.batch == 0 or ledger.batch_of(state.branch, state.batch - 1) in ledger.line:
            checkpoints[state.version] = path
    return checkpoints


def _check_step(checkpoints: Mapping[int, Path], from_step: int) -> None:
    if from_step not in (0, *checkpoints):
        steps = ", ".join(map(str, [0, *sorted(checkpoints)]))
        raise ConfigError(f"--from-step is {from_step}, and there is no such checkpoint: expected one of {steps}.")


def _available(config: Config, ledger: LedgerRows, batches: list[BatchRow], read_payload: ReadPayload) -> Available:
    for i, batch in enumerate(batches):
        reclaimed = [number for number in batch.groups if not ledger.groups[number].payload]
        if reclaimed:
            why = f"the payload of group {reclaimed[0]} was reclaimed (buffer.keep: all would have kept it)"
            return Available(batches[:i], why, damaged=False)
        try:
            for group in (ledger.groups[number] for number in batch.groups):
                for row in ledger.members.get(group.number, ()):
                    decoded(group, row, read_payload)
            rescored(config, ledger, batch, read_payload)
        except PayloadDiffers as error:
            return Available(batches[:i], str(error), damaged=True)
    return Available(batches, "", damaged=False)


def _described(available: Available, wanted: list[BatchRow]) -> str:
    n = len(available.batches)
    steps = f"steps {available.batches[0].version_after} to {available.batches[-1].version_after}" if n else "no step"
    ends = f"; step {wanted[n].version_after} ends it: {available.why}" if available.why else ""
    return f"the payloads of {steps} are there{ends}"


def _digest(backend: Backend) -> str:
    """The digest under which the weights would be published."""
    with TemporaryDirectory(prefix="asyncrl-replay-") as folder:
        return ShmPublisher(Path(folder)).publish(0, 0, backend.weights()).digest


def _same(backend: Backend, checkpoint: Path) -> bool:
    """Whether the float32 master weights, the teacher's too if it is an average of them, equal the checkpoint's."""
    with TemporaryDirectory(prefix="asyncrl-replay-") as folder:
        backend.save(Path(folder))
        mine, theirs = _weights(Path(folder)), _weights(checkpoint)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def _weights(folder: Path) -> dict[str, Tensor]:
    """The policy's, and those of a teacher that is an average of it."""
    model = load_folder(folder / "hf", torch.float32, f"the checkpoint {folder} is compared")
    average = torch.load(folder / AVERAGE, "cpu", weights_only=True) if (folder / AVERAGE).is_file() else {}
    return {**model.state_dict(), **{f"teacher: {name}": weight for name, weight in average.items()}}
