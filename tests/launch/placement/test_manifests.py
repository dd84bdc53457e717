"""What is printed for Slurm and Kubernetes: it parses, holds the config, and the script does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from asyncrl.config import Config
from asyncrl.launch.placement.manifests import kubernetes, slurm

KUBERNETES = "1.30"
STUBS = {
    # Slow enough that a reader of the first line alone is gone before the second is written.
    "scontrol": "echo node-a; sleep 0.2; echo node-b; echo node-c",
    # Without its options: those are srun's own up to the command.
    "srun": 'echo "srun $*" >> "$LOG"; while [ "${1#--}" != "$1" ]; do shift; done; "$@"',
    "hostname": "echo 10.0.0.7 fe80::1",
    "ray": 'echo "ray $*" >> "$LOG"',
    "asyncrl": 'echo "asyncrl $*" >> "$LOG"; trap "echo stopped >> $LOG; exit 130" TERM; '
    '[ -z "$SLOW" ] || { touch "$LOG.up"; for i in $(seq 100); do sleep 0.1; done; }; exit 5',
}


@pytest.fixture
def config() -> Config:
    return Config.model_validate(
        {
            "actors": {"count": 3, "engine": "vllm", "engine_options": {"tensor_parallel": 4}},
            "learner": {"backend": "fsdp2", "ranks": 8, "steps": 7},
            "launch": {"gpus": {"learner": 1}},
        }
    )


@pytest.fixture
def job(tmp_path: Path, config: Config) -> tuple[Path, dict[str, str]]:
    """The script, and an environment in which Slurm's and Ray's commands are fakes."""
    script = tmp_path / "job.sh"
    script.write_text(slurm(config, "my-run"))
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    given = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node-[a-c]"}
    given |= {"SLURM_JOB_NUM_NODES": "3", "LOG": str(tmp_path / "log"), "SLOW": ""}
    return script, {**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_a_job_script_starts_ray_on_every_node_and_the_run_on_the_first(job: tuple[Path, dict[str, str]]) -> None:
    script, environment = job
    assert subprocess.run(["bash", "-n", script], capture_output=True, check=True).stderr == b""
    text = script.read_text()
    # 8 ranks on one node, three actors of four GPUs on two more.
    assert "#SBATCH --nodes=3\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    ended = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 5, ended.stderr
    did = Path(environment["LOG"]).read_text()
    assert "ray start --head --node-ip-address=10.0.0.7 --port=20042 --num-cpus=16 --block" in did
    others = "srun --overlap --nodes=2 --ntasks=2 --cpus-per-task=16 --exclude=node-a"
    assert f"{others} ray start --address=10.0.0.7:20042 --num-cpus=16 --block" in did
    written = script.with_name("my-run-42.yaml")
    assert f"asyncrl launch --config {written}\n" in did
    read = Config.model_validate(yaml.safe_load(written.read_text()))
    assert (read.launch.backend, read.launch.host, read.weights.channel) == ("ray", "auto", "zmq")
    assert (read.learner.steps, read.buffer.dir) == (7, "/tmp/asyncrl-$SLURM_JOB_ID")


def test_slurm_s_signal_reaches_the_run_which_is_waited_for(job: tuple[Path, dict[str, str]]) -> None:
    script, environment = job
    process = subprocess.Popen(["bash", script], env=environment | {"SLOW": "1"}, start_new_session=True)
    try:
        for _ in range(300):
            if Path(environment["LOG"] + ".up").exists():
                break
            subprocess.run(["sleep", "0.05"], check=True)
        process.terminate()
        assert process.wait(20) == 130
    finally:
        process.kill()
    # Among the lines and not the last of them: Ray's own processes of the job write to the same file, in any order.
    assert "stopped" in Path(environment["LOG"]).read_text().splitlines()


def test_manifests_ask_for_what_the_roles_need(config: Config) -> None:
    shown, job = yaml.safe_load_all(kubernetes(config, "my-run"))
    read = Config.model_validate(yaml.safe_load(shown["data"]["config.yaml"]))
    assert (read.launch.runs_dir, read.buffer.dir, read.launch.backend) == ("/shared/runs", "/local/asyncrl", "ray")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups: dict[str, Any] = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert {name: group["replicas"] for name, group in groups.items()} == {"buffer": 1, "learner": 1, "actor": 3}
    gpus = {name: _container(group)["resources"]["limits"].get("nvidia.com/gpu") for name, group in groups.items()}
    assert gpus == {"buffer": None, "learner": "8", "actor": "4"}
    for group in (cluster["headGroupSpec"], *groups.values()):
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in _container(group)["volumeMounts"]} == volumes
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_ranks_on_two_nodes_have_two_nodes(config: Config) -> None:
    wide = config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": 16})})
    assert "#SBATCH --nodes=4\n" in slurm(wide, "my-run"), "two of eight ranks, two of four or eight GPUs of engines"
    small = Config.model_validate(
        {
            "learner": {"backend": "fsdp2", "ranks": 8, "shard": "node"},
            "launch": {"backend": "ray", "host": "auto", "gpus": {"learner": 1}, "ranks_per_node": 4},
            "weights": {"channel": "zmq"},
        }
    )
    shown, job = yaml.safe_load_all(kubernetes(small, "my-run"))
    read = Config.model_validate(yaml.safe_load(shown["data"]["config.yaml"]))
    assert (read.launch.ranks_per_node, read.learner.shard) == (4, "node")
    groups = {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    limits = _container(groups["learner"])["resources"]["limits"]
    assert (groups["learner"]["replicas"], limits["nvidia.com/gpu"], limits["cpu"]) == (2, "4", "5")


def test_manifests_are_kubernetes_own(config: Config) -> None:
    """By its schemas, where a field that there is not is an error; a RayJob's pods are pods like others."""
    shown, job = yaml.safe_load_all(kubernetes(config, "my-run"))
    cluster = job["spec"]["rayClusterSpec"]
    pods = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    templates = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod} for pod in pods
    ]
    for resource in (shown, *templates):
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    templates[0]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(templates[0], KUBERNETES, strict=True)


def _container(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize("kind", ["slurm", "k8s"])
def test_the_command_prints_and_starts_nothing(kind: str, tmp_path: Path) -> None:
    words = ["--config", str(Path(__file__).parents[3] / "configs" / "quickstart.yaml"), "--print", kind]
    said = subprocess.run(
        [sys.executable, "-m", "asyncrl", "launch", *words, "--launch.runs-dir", str(tmp_path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "asyncrl launch --config" in said.stdout
    assert list(tmp_path.iterdir()) == []
