"""Learner ranks over two real Ray nodes, two on each, over gloo; one node is lost, and another one comes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from asyncrl.audit.command import audit
from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.replay import rebuilt
from asyncrl.config import Config
from asyncrl.learner.__main__ import compute_alike
from asyncrl.learner.build import builder_of, objective_of
from asyncrl.learner.checkpoints.checkpoints import complete, read_list
from asyncrl.learner.trainer import Trainer
from asyncrl.model import load_folder
from asyncrl.run_folder import RunFolder
from asyncrl.sockets import HOST
from asyncrl.tracking.sinks.jsonl import by_step
from tests.launch.backends.ray_nodes import Nodes, ray_nodes
from tests.launch.backends.test_ray import Launch, launch, output, quickstart
from tests.waiting import until

__all__ = ["launch"]  # a fixture
RANKS = ("learner", "learner-1", "learner-2", "learner-3")
SMALL = {
    "learner__backend": "fsdp2", "learner__ranks": 4, "launch__ranks_per_node": 2,
    "learner__groups_per_step": 4, "learner__group_size": 4, "buffer__capacity": 64, "buffer__keep": "all",
    "actors__count": 1, "actors__slots": 16, "eval__tasks": 0, "learner__steps": 1000, "learner__lr": 1e-4,
    "learner__checkpoint_every": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as opened:
        opened.add(near=8)
        yield opened


def trained(run: RunFolder) -> int:
    return len(by_step(run.metrics)) if run.metrics.is_file() else 0


def pids(run: RunFolder) -> dict[str, int]:
    record = run.record()
    return {name: pid for name, (pid, _) in (record["processes"] | record.get("elsewhere", {})).items()}


def hosts(run: RunFolder) -> list[str]:
    """The address of each rank's node."""
    found = pids(run)
    return [psutil.Process(found[rank]).environ()[HOST] for rank in RANKS]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("shard", "lost"), [("all", RANKS[2:]), ("node", RANKS[:2])], ids=["all", "node"])
def test_ranks_on_two_nodes_train_what_one_process_does_and_outlive_the_loss_of_one(
    nodes: Nodes, tmp_path: Path, launch: Launch, shard: str, lost: tuple[str, str]
) -> None:
    """`lost`: the ranks on the node that is lost; with rank 0, the weights server is there too."""
    with_rank_0, node = "learner" in lost, nodes.add(far=3)
    resources = {rank: {"far" if rank in lost else "near": 1} for rank in RANKS}
    resources |= {"weights": resources["learner"], "buffer": {"near": 1}, "actor": {"near": 1}}
    fields = {**SMALL, "learner__shard": shard, "ray__resources": resources}
    launcher, run = quickstart(launch, nodes, tmp_path, **fields), RunFolder(tmp_path / "run")
    assert until(lambda: trained(run) >= 6, 300.0), output(launcher)
    at = dict(zip(RANKS, hosts(run), strict=True))
    stay = [rank for rank in RANKS if rank not in lost]
    assert {at[rank] for rank in lost} == {node.node_ip_address} != {at[rank] for rank in stay}
    assert run.rendezvous.read_text().startswith(f"{at['learner']} ")
    first, before = pids(run), trained(run)
    nodes.lose(node)
    assert until(lambda: all(pids(run)[rank] != first[rank] for rank in stay), 90.0), output(launcher)
    other = nodes.add(far=3)
    assert until(lambda: trained(run) >= before + 4, 300.0), output(launcher)
    assert hosts(run) == [other.node_ip_address if rank in lost else at[rank] for rank in RANKS]
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 130, out
    nodes.lose(other)
    restarts = json.loads(run.summary.read_text())["restarts"]
    assert {name: restarts.get(name, 0) >= 1 for name in RANKS} == dict.fromkeys(RANKS, True)
    assert (restarts.get("weights", 0) >= 1) == with_rank_0, "it is where rank 0 is"
    assert audit(run, step=None, format="json", out=run.path / "audit.json") == 0
    ledger = read_ledger(run.ledger(run.load_config()))
    assert len(ledger.tables["incarnations"]) >= 2
    assert {batch.branch for batch in ledger.line} == {0}, "recorded batches were redone"
    same_as_alone(run, ledger)


def same_as_alone(run: RunFolder, ledger: LedgerRows) -> None:
    """The newest checkpoint holds what one process makes of the recorded batches.

    Adam divides a gradient by its own size: of an element whose gradient is near 0, rounding alone becomes a part of
    the learning rate. So a few may differ by more."""
    newest = complete(run.checkpoints)[-1]
    version = read_list(newest)[0].version
    theirs = weights(newest / "hf")
    alone, began = weights_of_one_process(run, ledger, version)
    assert theirs.keys() == alone.keys()
    off = torch.cat([(theirs[n] - alone[n]).abs().flatten() for n in alone])
    moved = torch.cat([(alone[n] - began[n]).abs().flatten() for n in alone])
    print(version, float(off.max()), float(off.mean()), float((off > 1e-6).float().mean()), float(moved.mean()))
    assert float(moved.mean()) > 1e-4
    assert float((off > 1e-6).float().mean()) < 1e-3
    assert float(off.mean()) < 1e-7


def weights_of_one_process(
    run: RunFolder, ledger: LedgerRows, version: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """After the recorded batches up to this version, and before."""
    values: dict[str, Any] = run.load_config().model_dump()
    values["learner"] |= {"backend": "torch", "ranks": 1, "shard": "all"}
    config = Config.model_validate(values | {"launch": {**values["launch"], "ranks_per_node": None}})
    compute_alike(config)
    build = builder_of(config)
    trainer = Trainer(config, build(config), objective_of(config), build, None)
    began = {name: tensor.clone() for name, tensor in trainer.backend.weights()}
    with closing(PayloadFiles(run.ledger(config) / "payloads")) as payloads:
        for batch in ledger.line:
            if batch.version < version:
                assert trainer.train(rebuilt(config, ledger, batch, payloads.read), batch.version).outcome == "applied"
    return {name: tensor.clone() for name, tensor in trainer.backend.weights()}, began


def weights(folder: Path) -> dict[str, Tensor]:
    model = load_folder(folder, torch.float32, "compared")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
