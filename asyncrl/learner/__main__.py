"""`python -m asyncrl.learner RUN [--resume]`: the learner process, put together from the run's config."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from asyncrl.buffer.client import BufferClient
from asyncrl.config import Config
from asyncrl.config_rules import uncorrected
from asyncrl.errors import ConfigError
from asyncrl.launch.role import play, settle
from asyncrl.learner.backends.protocol import Backend
from asyncrl.learner.backends.torch import TorchBackend
from asyncrl.learner.checkpoints import Checkpoints
from asyncrl.learner.losses import LOSSES, corrected_where
from asyncrl.learner.objective import Objective
from asyncrl.learner.process import Learner
from asyncrl.model import load_tokenizer
from asyncrl.plugins import resolve
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.reporter import Reporter
from asyncrl.weights.protocol import Publisher
from asyncrl.weights.shm import ShmPublisher

BACKENDS: dict[str, Callable[[Config], Backend]] = {"torch": TorchBackend}
CHANNELS: dict[str, Callable[[Path], Publisher]] = {"shm": ShmPublisher}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.learner", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    arguments = parser.parse_args()
    run = RunFolder.existing(arguments.run)
    config = run.load_config()
    reporter = Reporter(run.address("launcher"), "learner")
    reporter.waiting("start")
    compute_alike(config)
    refuse_uncorrected(config)
    try:
        backend = resolve(config.learner.backend, BACKENDS, "learner.backend")(config)
        publisher = resolve(config.weights.channel, CHANNELS, "weights.channel")(run.shm)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    tokenizer = load_tokenizer(config.model)
    buffer = BufferClient(run.address("buffer"), identity="learner")
    learner = Learner(
        config,
        backend=backend,
        objective=Objective(config.learner),
        buffer=buffer,
        publisher=publisher,
        reporter=reporter,
        checkpoints=Checkpoints(run.checkpoints, config.learner.keep_checkpoints),
        save_tokenizer=tokenizer.save_pretrained,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: learner.stop())
    settle()
    try:
        learner.run(resume=arguments.resume)
    finally:
        reporter.close()
        buffer.close()


def refuse_uncorrected(config: Config) -> None:
    """The config refused the losses that come with asyncrl; of the user's own, the signature says how it corrects.
    Raises ConfigError."""
    try:
        loss = resolve(config.learner.loss, LOSSES, "learner.loss")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if corrected_where(loss) != "itself" and (problem := uncorrected(config)):
        raise ConfigError(problem)


def compute_alike(config: Config) -> None:
    """The same batches give the same weights bit for bit, on a CPU at the same number of threads."""
    torch.manual_seed(config.learner.seed)
    torch.set_num_threads(config.learner.threads)
    if not torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
        # The default fills every new tensor first, against reads of what nobody wrote; there are none.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


if __name__ == "__main__":
    play("learner", main)
