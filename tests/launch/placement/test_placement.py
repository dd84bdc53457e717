"""Which GPU each process has, for machines and clusters that are not here: `torch.cuda.device_count` is patched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import Config
from asyncrl.config.rules.ranks import nodes_of_ranks, ranks_per_node
from asyncrl.errors import ConfigError
from asyncrl.launch.backends.local import Local
from asyncrl.launch.placement import machine
from asyncrl.launch.placement.demand import Demand, demand
from asyncrl.launch.placement.plan import TO_RANK_0, Placed, fewest, lines, on_nodes, on_this_machine, unused
from asyncrl.launch.placement.pool import GpuPool
from asyncrl.launch.placement.report import before_start, planned
from asyncrl.launch.placement.resources import interfaces, resources_of, role_names, sharing_a_host
from asyncrl.launch.placement.visible import VisibleGpus
from asyncrl.launch.processes import Role
from asyncrl.learner.backends.gpu import index_of, refuse_same, take_gpu
from asyncrl.learner.backends.hf import fsdp2
from asyncrl.run_folder import RunFolder
from tests.waiting import until


def config(*, ranks: int = 1, engines: int = 1, parallel: int = 1, engine: str = "vllm", **sections: Any) -> Config:
    options = {} if engine == "hf" else {"tensor_parallel": parallel}
    given: dict[str, Any] = {
        "learner": {"ranks": ranks, "backend": "fsdp2" if ranks > 1 else "torch"},
        "actors": {"count": engines, "engine": engine, "engine_options": options},
    }
    return Config.model_validate({k: {**given.get(k, {}), **sections.get(k, {})} for k in given | sections})


RAY = {"launch": {"backend": "ray", "host": "auto", "gpus": {"learner": 1, "actor": 1}}, "weights": {"channel": "zmq"}}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def have(count: int, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(machine, "has_driver", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return have


def table(placed: list[Placed]) -> dict[str, tuple[Any, ...]]:
    return {p.role: (p.node, p.gpus, p.index, p.interface, p.shared) for p in placed}


HERE = "this machine"


@pytest.mark.parametrize(
    ("count", "asked", "expected"),
    [
        (1, config(), {"learner": ((0,), "", True), "actor-0": ((0,), "", True)}),
        (2, config(), {"learner": ((0,), "", False), "actor-0": ((1,), "", False)}),
        (
            4,
            config(ranks=2, engines=2),
            {
                "learner": ((0,), "lo", False),
                "learner-1": ((1,), "lo", False),
                "actor-0": ((2,), "", False),
                "actor-1": ((3,), "", False),
            },
        ),
        (
            8,
            config(ranks=4, engines=2, parallel=2),
            {
                "learner": ((0,), "lo", False),
                "learner-1": ((1,), "lo", False),
                "learner-2": ((2,), "lo", False),
                "learner-3": ((3,), "lo", False),
                "actor-0": ((4, 5), "", False),
                "actor-1": ((6, 7), "", False),
            },
        ),
        (
            4,
            config(engines=3),
            {"learner": ((0,), "", False), **{f"actor-{i}": ((i + 1,), "", False) for i in range(3)}},
        ),
        (
            2,
            config(engines=3),  # too few: the engines share the GPU without a rank
            {"learner": ((0,), "", False), **{f"actor-{i}": ((1,), "", True) for i in range(3)}},
        ),
        (
            2,
            config(ranks=2, weights={"channel": "nccl"}),  # rank 1 is in no group with an engine
            {
                "learner": ((0,), "gloo lo, NCCL chooses", False),
                "learner-1": ((1,), "gloo lo, NCCL chooses", True),
                "actor-0": ((1,), "", True),
            },
        ),
        (4, config(engine="hf"), {"learner": ((0,), "", False), "actor-0": ((), "", False)}),
        (
            2,
            config(
                weights={"channel": "cuda_ipc"},
                actors={"engine_options": {"gpu_memory": 0.4}},
                learner={"gpu_memory": 0.5},
            ),
            {"learner": ((0,), "", True), "actor-0": ((0,), "", True)},
        ),
        (
            1,
            config(launch={"gpus": {"learner": 0.5, "actor": 0.5}}),
            {"learner": ((0,), "", True), "actor-0": ((0,), "", True)},
        ),
    ],
)  # fmt: skip
def test_the_table_of_one_machine(count: int, asked: Config, expected: dict[str, tuple[Any, ...]]) -> None:
    found = table(on_this_machine(asked, count))
    assert found.pop("buffer") == (HERE, (), "-", "", False)
    indices = {role: ",".join(map(str, range(len(gpus)))) or "-" for role, (gpus, _, _) in expected.items()}
    assert found == {
        role: (HERE, gpus, indices[role], interface, shared) for role, (gpus, interface, shared) in expected.items()
    }


def test_every_process_sees_its_own_gpus_alone(gpus: Any) -> None:
    """F3: every engine and rank 0 used to land on the first GPU."""
    gpus(8)
    shown = VisibleGpus(config(ranks=4, engines=2, parallel=2))
    seen = {r: shown.environment(r)["CUDA_VISIBLE_DEVICES"] for r in ("learner", "learner-3", "actor-0", "actor-1")}
    assert seen == {"learner": "0", "learner-3": "3", "actor-0": "4,5", "actor-1": "6,7"}
    assert shown.environment("buffer") == {"CUDA_VISIBLE_DEVICES": "", "ASYNCRL_GPUS": "0"}
    gpus(2, visible="5,GPU-7f")
    shown = VisibleGpus(config())
    assert shown.environment("actor-0") == {"CUDA_VISIBLE_DEVICES": "GPU-7f", "ASYNCRL_GPUS": "1"}
    gpus(1)
    assert VisibleGpus(config()).environment("actor-0")["ASYNCRL_GPU_SHARED"] == "1"


def test_the_process_that_local_starts_sees_them(gpus: Any, tmp_path: Path) -> None:
    gpus(2)
    run = RunFolder.create(tmp_path / "run", config())
    local = Local(run, config())
    process = local.start(Role("actor-0", ("/bin/sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES; echo of $ASYNCRL_GPUS")))
    until(lambda: process.ended() is not None)
    assert process.log.read_text().splitlines() == ["sees 1", "of 1"]
    run.remove_temporary()


def test_a_machine_without_gpus_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_driver", lambda: False)
    assert VisibleGpus(config(ranks=2)).environment("learner") == {}
    with pytest.raises(ConfigError, match=r"launch\.gpus\.learner is 1, and torch sees no GPU on this machine"):
        VisibleGpus(config(launch={"gpus": {"learner": 1}}))


def test_actors_that_join_get_what_is_free_and_give_it_back(gpus: Any) -> None:
    gpus(3)
    shown = VisibleGpus(config())
    assert shown.environment("actor-1")["CUDA_VISIBLE_DEVICES"] == "2"
    assert shown.environment("actor-2") == {
        "CUDA_VISIBLE_DEVICES": "1", "ASYNCRL_GPUS": "1", "ASYNCRL_GPU_SHARED": "1"
    }  # fmt: skip
    shown.forget("actor-1")
    assert shown.environment("actor-3")["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize(
    ("count", "asked", "words"),
    [
        (2, config(ranks=3), r"learner-2 needs 1 GPU.*lower learner\.ranks"),
        (
            2,
            config(launch={"gpus": {"learner": 1, "actor": 1}}, actors={"count": 2}),
            r"actor-1 needs 1 GPU.*lower launch\.gpus",
        ),
        (2, config(parallel=4), r"actor-0 needs 4 GPUs.*tensor_parallel"),
        (1, config(weights={"channel": "nccl"}), r"channel is nccl.*actor-0.*rank 0.*cuda_ipc.*shm.*another GPU"),
        (
            1,
            config(weights={"channel": "nccl"}, launch={"gpus": {"learner": 0.5, "actor": 0.5}}),
            r"weights\.channel is nccl.*rank 0",
        ),
    ],
)  # fmt: skip
def test_what_has_no_room_is_refused_with_the_remedy(count: int, asked: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        on_this_machine(asked, count)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ({"learner": 2}, r"launch\.gpus\.learner is 2.*set launch\.gpus\.learner 1, which is for each rank"),
        ({"actor": 1.5}, r"launch\.gpus\.actor is 1\.5: expected a whole number, or a share"),
        ({"trainer": 1}, r"launch\.gpus names 'trainer'"),
    ],
)
def test_numbers_that_no_process_can_use_are_refused(gpus: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(launch={"gpus": gpus})


def test_the_table_of_a_ray_cluster() -> None:
    """F4: one GPU for each rank, N and not N², and each rank finds its own as number 0."""
    asked = config(ranks=4, engines=4, **RAY)
    assert sum(resources_of(f"learner-{rank}" if rank else "learner", asked)["GPU"] for rank in range(4)) == 4
    one = table(on_nodes(asked, {"node-0": 8}))
    assert {role: (node, gpus) for role, (node, gpus, *_) in one.items()} == {
        "buffer": ("node-0", ()),
        "weights": ("node-0", ()),
        **{f"learner-{i}" if i else "learner": ("node-0", (i,)) for i in range(4)},
        **{f"actor-{i}": ("node-0", (4 + i,)) for i in range(4)},
    }
    assert {index for _, gpus, index, *_ in one.values() if gpus} == {"0"}
    two = table(on_nodes(asked, {"node-0": 4, "node-1": 4}))
    assert {two[f"learner-{i}"][0] for i in range(1, 4)} == {two["weights"][0]} == {"node-0"}
    assert [two[f"actor-{i}"][:3] for i in range(4)] == [("node-1", (i,), "0") for i in range(4)]
    with pytest.raises(ConfigError, match=r"no node has the GPUs that weights 0 .* learner-3 1 need together"):
        on_nodes(asked, {"node-0": 2, "node-1": 2})


def test_the_table_of_ranks_on_two_nodes(gpus: Any) -> None:
    """F4: eight ranks needed one node with eight GPUs, or did not start."""
    gpus(4)
    asked = config(
        ranks=8, engines=1, parallel=4, **{**RAY, "launch": {**RAY["launch"], "ranks_per_node": 4, "gpus": {}}}
    )
    found = table(on_nodes(asked, {f"node-{i}": torch.cuda.device_count() for i in range(3)}))
    assert found["weights"][0] == "node-0", "with rank 0, whose memory it reads"
    for rank in range(8):
        name = f"learner-{rank}" if rank else "learner"
        assert found[name] == (f"node-{rank // 4}", (rank % 4,), "0", TO_RANK_0, False)
    assert found["actor-0"][:2] == ("node-2", (0, 1, 2, 3))
    assert "learner-4  node-1  0" in "\n".join(lines(on_nodes(asked, {"node-0": 4, "node-1": 4, "node-2": 4})))
    one = table(on_nodes(asked, {"node-0": 16}))
    assert {one[f"learner-{i}"][:2] for i in range(1, 8)} == {("node-0", (i,)) for i in range(1, 8)}
    with pytest.raises(ConfigError, match=r"learner-3 1 need together.*lower launch\.ranks_per_node, learner\.ranks"):
        on_nodes(asked, {"node-0": 3, "node-1": 3})


def test_the_table_that_dry_run_prints_for_cards(gpus: Any) -> None:
    """Ray with one and with two nodes."""
    gpus(8)
    sharing = {
        "launch": {"backend": "ray", "host": "auto"},
        "weights": {"channel": "nccl"},
        "model": {"path": "quickstart"},
    }
    rows = {ranks: planned(config(ranks=ranks, **sharing)) for ranks in (8, 16)}
    assert [text.split()[0] for text in rows[16][2:] if TO_RANK_0 in text] == rank_names(16)
    assert [text.split()[0] for text in rows[8][2:] if "gloo lo, NCCL chooses" in text] == rank_names(8)


def rank_names(ranks: int) -> list[str]:
    return ["learner", *(f"learner-{rank}" for rank in range(1, ranks))]


@pytest.mark.parametrize(
    ("ranks", "given", "each", "nodes"),
    [(1, None, 1, 1), (8, None, 8, 1), (9, None, 5, 2), (16, None, 8, 2), (24, None, 8, 3), (4, 2, 2, 2), (6, 4, 4, 2),
     (4, 8, 4, 1)],
)  # fmt: skip
def test_how_many_ranks_share_a_node(ranks: int, given: int | None, each: int, nodes: int) -> None:
    asked = config(ranks=ranks, **{**RAY, "launch": {**RAY["launch"], "ranks_per_node": given}})
    assert (ranks_per_node(asked), nodes_of_ranks(asked)) == (each, nodes)
    groups = sharing_a_host(role_names(asked), each)
    assert [len([r for r in group if r != "weights"]) for group in groups if "learner" in "".join(group)] == [
        min(each, ranks - each * block) for block in range(nodes)
    ]
    assert (interfaces(asked) == {}) == (nodes > 1 or ranks == 1)


def test_one_machine_takes_all_ranks_or_says_that_it_cannot() -> None:
    assert ranks_per_node(config(ranks=16)) == 16
    words = r"launch\.ranks_per_node is 2 and learner\.ranks 4, which takes 2 nodes, and launch\.backend local is one"
    with pytest.raises(ValueError, match=words):
        config(ranks=4, launch={"ranks_per_node": 2})
    config(ranks=4, launch={"ranks_per_node": 4})


def test_a_copy_on_each_node_needs_as_many_ranks_on_each() -> None:
    def sharded(ranks: int, each: int, **learner: Any) -> Config:
        launch = {**RAY, "launch": {**RAY["launch"], "ranks_per_node": each}}
        return config(ranks=ranks, **launch, learner={"shard": "node", **learner})

    sharded(4, 2)
    sharded(4, 4)
    with pytest.raises(ValueError, match=r"learner\.ranks 6, of which 4 share a node .* use 4 or 8 ranks"):
        sharded(6, 4)
    with pytest.raises(ValueError, match=r"learner\.shard is node but learner\.backend megatron does not read it"):
        sharded(4, 2, backend="megatron")


def test_under_ray_no_role_falls_to_the_cpu_where_the_run_has_gpus() -> None:
    on_cpus = config(ranks=2, launch={"backend": "ray", "host": "auto"}, weights={"channel": "zmq"})
    assert "GPU" not in resources_of("learner", on_cpus)
    partly = {**RAY, "launch": {**RAY["launch"], "gpus": {"actor": 1}}}
    assert resources_of("learner-1", config(ranks=2, **partly))["GPU"] == 1
    partly["launch"]["gpus"] = {"learner": 1}
    assert resources_of("actor-0", config(**partly))["GPU"] == 1
    partly["launch"]["gpus"] = {"learner": 0, "actor": 1}
    assert "GPU" not in resources_of("learner", config(**partly))


def test_nccl_is_bound_to_the_loopback_only_where_nothing_leaves_the_host() -> None:
    """F5: the unique id of the weights' communicator held 127.0.0.1."""
    assert interfaces(config()) == {}
    assert interfaces(config(ranks=2)) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert interfaces(config(ranks=2, weights={"channel": "nccl"})) == {"GLOO_SOCKET_IFNAME": "lo"}
    away = table(on_nodes(config(ranks=2, **{**RAY, "weights": {"channel": "nccl"}}), {"node-0": 8}))
    assert away["learner-1"][3] == "gloo lo, NCCL chooses"


def test_the_table_as_text_and_what_is_left() -> None:
    asked = config(engines=2)
    text = lines(on_this_machine(asked, 8))
    assert text[0].split() == ["role", "node", "GPU", "index", "interface", "planned", "memory"]
    assert text[2].split() == ["learner", "this", "machine", "0", "0", "-", "-"]
    assert unused(asked, 8) == (
        "GPUs 3, 4, 5, 6, 7 are not used: actors.count 7, or learner.ranks (learner.backend fsdp2) would use them."
    )
    assert unused(asked, 3) == ""
    assert "(shared)" in lines(on_this_machine(asked, 1))[3]
    assert fewest(asked) == 3
    assert fewest(config(ranks=2, engines=2, parallel=4)) == 10
    assert "1 of a node" in lines(on_nodes(config(**RAY), {}))[3]


def test_shares_are_packed_and_two_ranks_never_share() -> None:
    pool = GpuPool(2)
    assert [pool.take(Demand(role, 0.5, named=True)) for role in ("learner", "learner-1", "actor-0", "actor-1")] == [
        (0,), (1,), (0,), (1,)
    ]  # fmt: skip


def test_the_launcher_shows_the_table(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    assert before_start(config())[2].split()[:5] == ["learner", "this", "machine", "0", "0"]
    with pytest.raises(ConfigError, match="learner-2 needs 1 GPU"):
        before_start(config(ranks=3))
    monkeypatch.setattr(machine, "has_driver", lambda: False)
    assert before_start(config()) == []
    assert planned(config())[0] == "placement on a machine with 2 GPUs (torch sees none on this one):"
    assert planned(config(engine="hf"))[0] == "placement on this machine, where torch sees 0 GPUs:"
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        before_start(config(launch={"gpus": {"actor": 1}}))


def test_a_rank_takes_the_gpu_that_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """F4: with one GPU for each rank, ranks above 0 asked for GPUs that they do not see."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [index_of(rank) for rank in range(4)] == [0, 0, 0, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [index_of(rank) for rank in range(4)] == [0, 1, 2, 3]
    refuse_same(["host GPU-a", "host GPU-b"])
    with pytest.raises(ConfigError, match=r"ranks 0 and 2 have the same GPU \(host GPU-a\)"):
        refuse_same(["host GPU-a", "host GPU-b", "host GPU-a"])


def test_a_learner_that_was_given_a_gpu_does_not_train_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_GPUS", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"gives this process 1 GPU, and torch sees 0 .*install a CUDA build"):
        take_gpu(config(), 0)
    monkeypatch.setenv("ASYNCRL_GPUS", "0")
    take_gpu(config(), 0)


def test_a_rank_of_fsdp2_builds_on_the_gpu_that_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole constructor up to the model, for a second rank that sees one GPU."""
    built: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(fsdp2.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(fsdp2.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(fsdp2.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(fsdp2.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(fsdp2.Fsdp2Backend, "_identities", lambda self: ["GPU-a", "GPU-b"], raising=False)
    monkeypatch.setattr(fsdp2.TorchBackend, "__init__", lambda self, config, model, device: built.append(device))
    fsdp2.Fsdp2Backend(config(ranks=2))
    assert built == ["cuda:0"]


@pytest.mark.parametrize(
    ("actors", "field", "gpus"),
    [
        ({"engine": "vllm", "engine_options": {"tensor_parallel": 2}}, "tensor_parallel 2", 2),
        ({"engine": "sglang", "engine_options": {"args": {"tp_size": 4}}}, r"args\.tp_size 4", 4),
        ({"engine": "sglang", "engine_options": {"args": {"tp": 4}}}, r"args\.tp 4", 4),
        ({"engine": "sglang", "engine_options": {"args": {"tensor_parallel_size": 4}}}, "tensor_parallel_size 4", 4),
        ({"engine": "sglang", "engine_options": {"tensor_parallel": 2}}, "", 1),
        ({"engine": "sglang", "engine_options": {"args": "--tp 2"}}, "", 1),
        ({"engine": "sglang", "engine_options": {"args": {"tp": "two"}}}, "", 1),
        ({"engine": "sglang", "engine_options": {"urls": ["http://a:1"], "args": {"tp": 2}}}, "", 0),
    ],
)
def test_the_rule_and_the_placement_read_the_same_option(actors: dict[str, Any], field: str, gpus: int) -> None:
    assert demand("actor-0", Config.model_validate({"actors": actors})).gpus == gpus
    if field:
        with pytest.raises(ValueError, match=rf"launch\.gpus\.actor is 1 and .*{field}: an actor needs as many GPUs"):
            Config.model_validate({"actors": actors, "launch": {"gpus": {"actor": 1}}})
    Config.model_validate({"actors": actors, "launch": {"gpus": {"actor": gpus}}})
