"""`python -m asyncrl.scorer RUN --name scorer-0`: one scorer process, built from the run's config."""

from __future__ import annotations

from asyncrl.process import lifeline

if __name__ == "__main__":
    lifeline.bind_to_launcher()  # first: the imports below may take seconds, and the launcher may end meanwhile

import argparse
import json
import logging
import signal
from pathlib import Path

from asyncrl.buffer.client import BufferClient
from asyncrl.config import Config, ModelConfig
from asyncrl.config.teacher import words_scored
from asyncrl.errors import ConfigError
from asyncrl.model import load_tokenizer, teacher_folder
from asyncrl.process.role import play, settle
from asyncrl.rendering.same_words import refuse_other_words
from asyncrl.run_folder import RunFolder
from asyncrl.scorer.dialects import DIALECTS
from asyncrl.scorer.loop import Scorer
from asyncrl.scorer.score_log import ScoreLog
from asyncrl.scorer.servers import TeacherServers, remembered
from asyncrl.tracking.reporter import Reporter

log = logging.getLogger(__name__)

FIELD = "learner.teacher.path"
PROBED = "What is 2 + 3? The answer is 5. Look up the key a, and then say what it holds."
"""Text whose tokens the teacher is known by."""
PROBE_TOKENS = 32


def probe_tokens(config: Config) -> list[int]:
    """Tokens of the probe. Raises ConfigError for a teacher of other words or another template than the policy's."""
    given = config.learner.teacher
    folder = teacher_folder(given.path)
    policy, teacher = load_tokenizer(config.model), load_tokenizer(ModelConfig(path=str(folder)), FIELD)
    about = json.loads((folder / "config.json").read_text())
    words = about.get("vocab_size") or (about.get("text_config") or {}).get("vocab_size") or len(policy)
    refuse_other_words(policy, teacher, given.path, int(words))
    tokens: list[int] = policy.encode(PROBED, add_special_tokens=False)
    longest = max(2, min(PROBE_TOKENS, config.env.max_tokens))
    if len(tokens) < 2:
        raise ConfigError(f"model.path is {config.model.path!r}, whose tokenizer makes no tokens of {PROBED!r}.")
    return tokens[:longest]


def main(path: Path, name: str) -> None:
    run = RunFolder.existing(path)
    config = run.load_config()
    reporter = Reporter(run.address("launcher"), name)
    reporter.waiting("start")
    given = config.learner.teacher
    servers = TeacherServers(
        given.servers,
        DIALECTS[given.dialect](),
        k=words_scored(config),
        server_s=given.server_s,
        longest=config.env.max_tokens,
        probe=probe_tokens(config),
        remember=remembered(run.teacher, given.path),
    )
    deadline_s = min(config.buffer.lease_s / 3, config.launch.stop_s / 2)  # it leaves within its stop time
    buffer = BufferClient(run.address("buffer"), identity=name, deadline_s=deadline_s)
    acks = ScoreLog(run.score_logs / f"{name}.jsonl", flush=config.buffer.fsync != "off")
    scorer = Scorer(name, config, buffer=buffer, servers=servers, score_log=acks, reporter=reporter)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: scorer.stop())
    settle()
    reporter.ready()
    log.info("ready: asks %s", ", ".join(given.servers))
    try:
        scorer.run()
    finally:
        servers.close()
        acks.close()
        buffer.close()
        reporter.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m asyncrl.scorer", description="One scorer process of a run.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--name", required=True, help="name of this scorer, for instance scorer-0")
    arguments = parser.parse_args()
    play(arguments.name, lambda: main(arguments.run, arguments.name))
