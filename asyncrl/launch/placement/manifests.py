"""`asyncrl launch --print slurm|k8s`: the job script or the manifests that run a config on a cluster. Pure.

Both start Ray on the nodes and run the command there; both contain the config.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import yaml

from asyncrl.config import Config
from asyncrl.config.rules.ranks import NODE_GPUS, ranks_per_node
from asyncrl.launch.placement.resources import resources_of, role_names, sharing_a_host

NODE_CPUS = 16
GRACE_S = 120
"""Seconds between SIGTERM and SIGKILL: actors drain, the learner writes its last checkpoint."""

SLURM = """\
#!/bin/bash
# Made by `asyncrl launch --print slurm`. Add what your site asks for: --partition, --account, --time; activate the
# environment in which asyncrl and ray are installed before `sbatch`. The folder of submission is shared by all nodes.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
{gpus}#SBATCH --signal=B:TERM@{grace}
set -euo pipefail

config="$SLURM_SUBMIT_DIR/{name}-$SLURM_JOB_ID.yaml"
cat > "$config" <<'END_OF_CONFIG'
{config}END_OF_CONFIG

export RAY_USAGE_STATS_ENABLED=0
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")  # `| head -n 1` would end scontrol, and so the job
ip=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | cut -d ' ' -f 1)
export RAY_ADDRESS="$ip:$((20000 + SLURM_JOB_ID % 20000))"

# srun does not take over --cpus-per-task from sbatch.
srun --overlap --nodes=1 --ntasks=1 --cpus-per-task={cpus} --nodelist="$head" \\
  ray start --head --node-ip-address="$ip" --port="${{RAY_ADDRESS##*:}}" --num-cpus={cpus} --block &
for attempt in $(seq 60); do
  ray health-check --address "$RAY_ADDRESS" && break
  [ "$attempt" -lt 60 ] || {{ echo "Ray does not answer at $RAY_ADDRESS" >&2; exit 1; }}
  sleep 2
done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  others="$((SLURM_JOB_NUM_NODES - 1))"
  srun --overlap --nodes="$others" --ntasks="$others" --cpus-per-task={cpus} --exclude="$head" \\
    ray start --address="$RAY_ADDRESS" --num-cpus={cpus} --block &
fi

asyncrl launch --config "$config" &
launcher=$!
trap 'kill -TERM "$launcher"' TERM
code=0
wait "$launcher" || code=$?
# A signal ends the first wait; the run still writes its checkpoint.
while kill -0 "$launcher" 2> /dev/null; do wait "$launcher" && code=0 || code=$?; done
exit "$code"
"""


def slurm(config: Config, name: str) -> str:
    """A script for `sbatch`."""
    config = _on_a_cluster(config, runs_dir=None, ledger="/tmp/asyncrl-$SLURM_JOB_ID")
    groups = _groups(config)
    node = _node(groups.values())
    return SLURM.format(
        name=shlex.quote(name),
        nodes=_first_fit(groups.values(), node),
        cpus=int(node["CPU"]),
        gpus=f"#SBATCH --gpus-per-node={int(node['GPU'])}\n" if node["GPU"] else "",
        grace=GRACE_S,
        config=_text(config),
    )


def kubernetes(config: Config, name: str) -> str:
    """A ConfigMap and a RayJob for the KubeRay operator (ray.io/v1)."""
    config = _on_a_cluster(config, runs_dir="/shared/runs", ledger="/local/asyncrl")
    workers: dict[str, tuple[int, dict[str, float]]] = {}
    for group, wanted in _groups(config).items():
        kind = "learner" if "learner" in group else group[0].partition("-")[0]  # the weights server is with rank 0
        count, most = workers.get(kind, (0, {}))
        workers[kind] = (count + 1, {k: max(most.get(k, 0.0), v) for k, v in wanted.items()})
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": "asyncrl launch --config /config/config.yaml",
            "shutdownAfterJobFinishes": True,
            "submissionMode": "K8sJobMode",
            "rayClusterSpec": {
                "headGroupSpec": {
                    # Only the launcher runs there.
                    "rayStartParams": {"num-cpus": "0"},
                    "template": _pod(name, "ray-head", {"CPU": 2.0}),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": kind, "replicas": count, "minReplicas": count, "maxReplicas": count,
                        "rayStartParams": {}, "template": _pod(name, "ray-worker", wanted),
                    }
                    for kind, (count, wanted) in workers.items()
                ],
            },
        },
    }  # fmt: skip
    config_map = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"config.yaml": _text(config)},
    }  # fmt: skip
    head = (
        "# Made by `asyncrl launch --print k8s`. `asyncrl:latest` stands for an image with asyncrl and ray,\n"
        "# `shared` for a claim that many pods may write (ReadWriteMany): run folders and checkpoints lie there.\n"
    )
    return head + yaml.safe_dump_all([config_map, job], sort_keys=False, allow_unicode=True, width=120)


PRINTERS: dict[str, Callable[[Config, str], str]] = {"slurm": slurm, "k8s": kubernetes}


def _on_a_cluster(config: Config, *, runs_dir: str | None, ledger: str) -> Config:
    """The config with what several hosts need, as far as it does not say so itself."""
    values = config.model_dump(mode="json")
    values["launch"] |= {"backend": "ray", "host": config.launch.host or "auto"}
    values["launch"] |= {"runs_dir": runs_dir} if runs_dir else {}
    values["weights"]["channel"] = "zmq" if config.weights.channel == "shm" else config.weights.channel
    values["buffer"]["dir"] = config.buffer.dir or ledger
    values["ray"]["address"] = ""  # RAY_ADDRESS is set where the command runs
    return Config.model_validate(values)


def _text(config: Config) -> str:
    """The fields that differ from the defaults, as YAML."""
    values, defaults = config.model_dump(mode="json"), Config().model_dump(mode="json")
    changed = {s: {k: v for k, v in values[s].items() if v != defaults[s][k]} for s in values}
    return str(yaml.safe_dump({s: v for s, v in changed.items() if v}, sort_keys=False, allow_unicode=True))


def _groups(config: Config) -> dict[tuple[str, ...], dict[str, float]]:
    """The resources of each group of roles that share a host."""
    groups = {}
    for group in sharing_a_host(role_names(config), ranks_per_node(config)):
        each = [resources_of(name, config) for name in group]
        groups[group] = {kind: sum(n.get(kind, 0.0) for n in each) for kind in ("CPU", "GPU")}
    return groups


def _node(groups: Iterable[Mapping[str, float]]) -> dict[str, float]:
    requested = list(groups)
    gpus, cpus = (max(g[kind] for g in requested) for kind in ("GPU", "CPU"))
    return {"GPU": max(gpus, NODE_GPUS) if gpus else 0.0, "CPU": max(cpus, NODE_CPUS)}


def _first_fit(groups: Iterable[Mapping[str, float]], node: Mapping[str, float]) -> int:
    """The number of nodes that hold all groups, each group on one node.

    >>> _first_fit([{"GPU": 8, "CPU": 8}, {"GPU": 4, "CPU": 1}, {"GPU": 4, "CPU": 1}], {"GPU": 8, "CPU": 16})
    2
    """
    nodes: list[dict[str, float]] = []
    for group in sorted(groups, key=lambda g: (-g["GPU"], -g["CPU"])):
        for left in nodes:
            if all(left[kind] >= group[kind] for kind in node):
                break
        else:
            left = dict(node)
            nodes.append(left)
        for kind in node:
            left[kind] -= group[kind]
    return len(nodes)


def _pod(name: str, container: str, wanted: Mapping[str, float]) -> dict[str, Any]:
    limits: dict[str, str] = {"cpu": f"{max(wanted.get('CPU', 0.0), 1.0):g}", "memory": "8Gi"}
    if wanted.get("GPU"):
        limits["nvidia.com/gpu"] = str(-int(-wanted["GPU"] // 1))
    mounts = {"shared": "/shared", "config": "/config", "local": "/local", "memory": "/dev/shm"}
    return {
        "spec": {
            "containers": [
                {
                    "name": container,
                    "image": "asyncrl:latest",
                    "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
                    "resources": {"requests": limits, "limits": limits},
                    "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts.items()],
                }
            ],
            "terminationGracePeriodSeconds": GRACE_S,
            "volumes": [
                {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}},
                {"name": "config", "configMap": {"name": name}},
                {"name": "local", "emptyDir": {}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }
