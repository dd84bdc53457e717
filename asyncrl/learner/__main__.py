"""`python -m asyncrl.learner RUN [--rank R] [--resume]`: one rank of the learner, built from the run's config."""

from __future__ import annotations

from asyncrl.process import lifeline

if __name__ == "__main__":
    lifeline.bind_to_launcher()  # first: the imports below may take seconds, and the launcher may end meanwhile

import argparse
import signal
import sys
from pathlib import Path

import torch

from asyncrl.buffer.client import BufferClient
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.gpu import take_gpu
from asyncrl.learner.build import builder_of, objective_of, refuse_incomplete, refuse_without_teacher
from asyncrl.learner.checkpoints.checkpoints import Checkpoints
from asyncrl.learner.demonstrations import Rendered
from asyncrl.learner.distillation.identity import recorded, refuse_another, remember
from asyncrl.learner.follower import Follower
from asyncrl.learner.hints import HintRows
from asyncrl.learner.loop import Learner
from asyncrl.learner.ranks import DistributedRanks, Ranks
from asyncrl.learner.reporting.samples import Samples
from asyncrl.learner.trainer import Trainer
from asyncrl.model import load_tokenizer
from asyncrl.process.logs import STOPPED
from asyncrl.process.role import play, settle
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.reporter import Reporter
from asyncrl.tracking.rollouts.text import token_text
from asyncrl.weights.channels import Channel, channel


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.learner", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint, if there is one")
    parser.add_argument("--rank", type=int, default=0, help="which of learner.ranks this is; 0 leads the others")
    arguments = parser.parse_args()
    run = RunFolder.existing(arguments.run)
    config = run.load_config()
    name = f"learner-{arguments.rank}" if arguments.rank else "learner"
    reporter = Reporter(run.address("launcher"), name)
    reporter.waiting("start")
    compute_alike(config)
    take_gpu(config, arguments.rank)
    objective, build = objective_of(config), builder_of(config)
    several = config.learner.ranks > 1
    ranks = DistributedRanks(config, arguments.rank, run.rendezvous, run.key("learner ranks")) if several else Ranks()
    try:
        backend = build(config)
        refuse_incomplete(config, backend)
        refuse_without_teacher(config, backend)
        weights = channel(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    trainer = Trainer(config, backend, objective, build, Rendered.of(config), HintRows.of(config))
    buffer = BufferClient(run.address("buffer"), identity=name)
    over = True
    try:
        if arguments.rank:
            refuse_another(
                recorded(run.teacher), trainer.teacher, config.learner.teacher.path, "recorded in its folder"
            )
            follow(config, trainer, ranks, buffer, reporter)
        else:
            remember(run.teacher, config.learner.teacher.path, trainer.teacher)
            learner = leader(run, config, trainer, ranks, buffer, weights, reporter)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: learner.stop())
            settle()
            over = learner.run(resume=arguments.resume, branch_from=run.fresh_from(), on_branch=run.fresh.unlink)
        ranks.leave()
    finally:
        reporter.close()
        buffer.close()
    if not over:
        sys.exit(STOPPED)


def leader(
    run: RunFolder,
    config: Config,
    trainer: Trainer,
    ranks: Ranks,
    buffer: BufferClient,
    weights: Channel,
    reporter: Reporter,
) -> Learner:
    tokenizer = load_tokenizer(config.model)
    return Learner(
        config,
        trainer=trainer,
        ranks=ranks,
        buffer=buffer,
        publisher=weights.publisher(run),
        reporter=reporter,
        checkpoints=Checkpoints(run.checkpoints, config.learner.keep_checkpoints, config.learner.checkpoint_s),
        save_tokenizer=tokenizer.save_pretrained,
        samples=Samples(run.rollouts, config.tracking, lambda: token_text(tokenizer)),
    )


def follow(config: Config, trainer: Trainer, ranks: Ranks, buffer: BufferClient, reporter: Reporter) -> None:
    # A rank that is told to stop goes on: rank 0 needs the others for its last checkpoint, and then ends them.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    settle()
    follower = Follower(
        trainer,
        ranks=ranks,
        buffer=buffer,
        reporter=reporter,
        patience_s=config.launch.restart_window_s,
        checkpoint_s=config.learner.checkpoint_s,
    )
    follower.run()


def compute_alike(config: Config) -> None:
    """Makes the same batches give the same weights bit for bit, on a CPU at the same number of threads."""
    torch.manual_seed(config.learner.seed)
    torch.set_num_threads(config.learner.threads)
    if not torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
        # By default torch fills every new tensor, to guard against reads of unwritten memory; there are none.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


if __name__ == "__main__":
    play("learner", main)
