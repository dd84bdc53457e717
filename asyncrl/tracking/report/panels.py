"""The panels: series shown together, drawn by the report and built as a workspace at wandb."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from asyncrl.tracking.series import PLACEHOLDERS, SERIES


@dataclass(frozen=True, slots=True)
class Panel:
    slug: str
    """File name of its picture."""
    title: str
    unit: str
    series: tuple[str, ...]
    """Names or families of the table of series."""
    x: Literal["step", "wall_s", "tokens"] = "step"
    stacked: bool = False
    log: bool = False


REWARD = (
    Panel(
        "reward", "Reward and success", "per trajectory",
        ("reward/mean", "reward/success", "reward/held_out_success_sampled", "reward/held_out_success_greedy"),
    ),
    Panel(
        "held_out", "Success on each held-out set", "share",
        ("reward/held_out/{set}/sampled", "reward/held_out/{set}/greedy"),
    ),
    Panel("episode", "Length of an episode", "tokens", ("reward/length",)),
    Panel("turns", "Turns of an episode", "turns", ("reward/turns",)),
    Panel("stop_reasons", "What ended the episodes", "share", ("reward/stopped/{stop}",), stacked=True),
    Panel("groups_without_gradient", "Groups without a gradient", "share", ("reward/zero_variance_groups",)),
)  # fmt: skip

THROUGHPUT = (
    Panel(
        "throughput", "Tokens generated and trained", "tokens/s",
        ("throughput/tokens_generated_per_s", "throughput/tokens_trained_per_s"), x="wall_s",
    ),
    Panel("wasted", "Tokens never trained on, by reason", "tokens", ("throughput/tokens_wasted/{reason}",)),
    Panel("waits_learner", "What the learner waits for", "share of time", ("waits/learner/{cause}",), stacked=True),
    Panel("waits_actor", "What the actors wait for", "share of time", ("waits/actor/{cause}",), stacked=True),
    Panel("staleness", "Staleness of trained tokens", "training steps",
          ("staleness/mean", "staleness/max", "staleness/bound", "staleness/target")),
    Panel("staleness_trained", "Trained tokens by staleness", "share", ("staleness/trained_tokens/{bucket}",),
          stacked=True),
    Panel("staleness_in_flight", "Groups in flight by staleness", "groups", ("staleness/in_flight/{bucket}",),
          stacked=True),
    Panel("staleness_in_queue", "Groups in the queue by staleness", "groups", ("staleness/in_queue/{bucket}",),
          stacked=True),
    Panel("weights", "Seconds to publish and to load weights", "s", ("weights/publish_s", "weights/load_s")),
    Panel("step_time", "Where a training step's time goes", "s",
          ("throughput/step_s", "throughput/compute_s", "throughput/proximal_s", "weights/publish_s")),
)  # fmt: skip

BUFFER = (
    Panel("buffer_fill", "Buffer fill", "share of capacity", ("buffer/fill",)),
    Panel("groups", "Groups by state", "groups",
          ("buffer/groups/in_flight", "buffer/groups/waiting", "buffer/groups/assigned")),
    Panel("dropped", "Groups dropped, by reason", "groups", ("buffer/dropped/{drop}",)),
    Panel("puts", "Trajectories stored", "per second",
          ("buffer/puts_per_s", "buffer/duplicates_per_s", "buffer/late_per_s")),
    Panel("bias_reward", "Reward: generated, trained, dropped", "reward", ("buffer/reward/{fate}",)),
    Panel("bias_length", "Length: generated, trained, dropped", "tokens", ("buffer/length/{fate}",)),
)  # fmt: skip

CORRECTION = (
    Panel("ess", "Effective sample size", "share of tokens", ("correction/ess", "correction/ess/{bucket}")),
    Panel("mismatch", "KL between behaviour and proximal policy", "nats",
          ("correction/mismatch_kl", "correction/mismatch_kl/{bucket}")),
    Panel("ratio_tail", "Largest importance ratio", "ratio",
          ("correction/ratio_p99", "correction/ratio_max"), log=True),
    Panel("clip", "Clipped tokens", "share", ("correction/clip_fraction", "correction/clip_fraction/{bucket}")),
)  # fmt: skip

UPDATE = (
    Panel("loss", "Loss", "", ("weights/loss", "weights/policy_loss")),
    Panel("demonstrations", "Cross entropy of demonstrations", "nats per token", ("weights/demonstrations/loss",)),
    Panel("grad_norm", "Gradient norm", "", ("weights/grad_norm",)),
    Panel("entropy", "Entropy", "nats per token", ("weights/entropy",)),
    Panel("lr", "Learning rate", "", ("weights/lr",)),
)

TEACHER = (
    Panel("teacher_kl", "From the teacher", "nats per token",
          ("teacher/reverse_kl", "teacher/forward_kl", "teacher/divergence", "teacher/lower_bound")),
    Panel("teacher_turns", "KL(policy || teacher) by turn", "nats per token", ("teacher/reverse_kl_by_turn/{turn}",)),
    Panel("teacher_positions", "KL(policy || teacher) by position in the turn", "nats per token",
          ("teacher/reverse_kl_by_position/{position}",)),
    Panel("teacher_agreement", "Policy and teacher find the same word most likely", "share", ("teacher/agreement",)),
    Panel("teacher_entropy", "Entropy of policy and teacher", "nats per token", ("weights/entropy", "teacher/entropy")),
)  # fmt: skip

SYSTEM = (
    Panel("cpu", "CPU per process", "cores", ("system/cpu/{role}",)),
    Panel("memory", "Memory per process", "bytes", ("system/rss_bytes/{role}",)),
    Panel("restarts", "Restarts", "processes", ("system/restarts",)),
)

DASHBOARD: dict[str, tuple[Panel, ...]] = {
    "Reward": REWARD,
    "Throughput": THROUGHPUT,
    "Buffer": BUFFER,
    "Correction": CORRECTION,
    "Update": UPDATE,
    "Teacher": TEACHER,
    "System": SYSTEM,
}


def regex(name: str) -> str:
    """A pattern of the series of a family, or of one name.

    >>> regex("staleness/in_queue/{bucket}")
    'staleness/in_queue/(0|1|2|3|4_7|8_15|16_up)'
    """

    def one(match: re.Match[str]) -> str:
        allowed = PLACEHOLDERS[match.group(1)]
        return r"[^/]+" if allowed is None else "(" + "|".join(allowed) + ")"

    return re.sub(r"\{(\w+)\}", one, name)


def members(name: str, known: Iterable[str]) -> list[str]:
    """The recorded names that a name or family of a panel covers; a closed family in its own order."""
    if not SERIES[name].family:
        return [name] if name in known else []
    pattern = re.compile(regex(name))
    found = [k for k in known if pattern.fullmatch(k)]
    (placeholder,) = re.findall(r"\{(\w+)\}", name)
    order = PLACEHOLDERS[placeholder]
    return sorted(found) if order is None else sorted(found, key=lambda k: order.index(k.rsplit("/", 1)[1]))
