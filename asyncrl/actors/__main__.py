"""`python -m asyncrl.actors RUN --name actor-0`: one actor process, built from the run's config."""

from __future__ import annotations

from asyncrl.process import lifeline

if __name__ == "__main__":
    lifeline.bind_to_launcher()  # first: the imports below may take seconds, and the launcher may end meanwhile

import argparse
import asyncio
import functools
import logging
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from asyncrl.actors.ack_log import AckLog
from asyncrl.actors.components import Components
from asyncrl.actors.engines import build_engine
from asyncrl.actors.leases import LeaseKeeper, Patience
from asyncrl.actors.loop import Actor
from asyncrl.actors.player import players
from asyncrl.actors.weight_updates import DrainingEngine, WeightUpdates
from asyncrl.buffer.client import AsyncBufferClient, BufferClient
from asyncrl.process.daemon_threads import running, use_daemon_threads
from asyncrl.process.role import play, settle
from asyncrl.rendering.build import build_renderer
from asyncrl.rendering.template import TemplateRenderer
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.reporter import Reporter
from asyncrl.weights.channels import channel

log = logging.getLogger(__name__)


async def run(folder: RunFolder, name: str) -> None:
    config = folder.load_config()
    reporter = Reporter(folder.address("launcher"), name)
    reporter.waiting("start")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    use_daemon_threads()

    renderer = build_renderer(config)
    for situation in renderer.prefix_breaks() if isinstance(renderer, TemplateRenderer) else ():
        log.warning("the chat template is not prefix-stable: %s. There, an episode becomes several rows.", situation)
    engine = build_engine(config)
    if config.weights.drain:
        engine = DrainingEngine(engine)
    opened = AsyncExitStack()
    play_episode = await opened.enter_async_context(players(config, engine, renderer, actor=name))
    weights = channel(config).subscriber(folder)  # may fetch while the engine starts
    await engine.start()

    address, deadline_s = folder.address("buffer"), config.buffer.lease_s / 3
    buffer = AsyncBufferClient(address, identity=name, deadline_s=deadline_s)
    # A second client, because another thread uses it.
    renewals = BufferClient(address, identity=f"{name}-leases", deadline_s=deadline_s)
    keeper = LeaseKeeper(
        functools.partial(renewals.renew, name),
        lambda: engine.load_stats()["generated"],
        Patience(config.actors.episode_idle_s, config.actors.episode_s, config.actors.episode_max_s),
        deadline_s,
    )
    acks = AckLog(folder.acks / f"{name}.jsonl", flush=config.buffer.fsync != "off")
    updates = WeightUpdates(engine, weights, recompute_kv=config.weights.kv == "recompute")
    actor = Actor(name, config, Components(engine, play_episode, buffer, updates, keeper, reporter, acks))
    settle()
    reporter.ready()
    log.info("ready: engine %s, %d slots", config.actors.engine, config.actors.most_slots)
    try:
        await actor.run(stop)
    finally:
        await opened.aclose()
        await engine.close()
        weights.close()
        acks.close()
        await buffer.close()
        renewals.close()
        reporter.close()
    await asyncio.sleep(0.1)
    if stuck := running():
        log.warning("%d plain functions (tools, scores, agents) did not return and are abandoned", stuck)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.actors", description="One actor process of a run.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--name", required=True, help="name of this actor, for instance actor-0")
    arguments = parser.parse_args()
    play(arguments.name, lambda: asyncio.run(run(RunFolder.existing(arguments.run), arguments.name)))


if __name__ == "__main__":
    main()
