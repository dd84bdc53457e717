"""The table of series: everything that a run measures, with its unit and meaning.

A name is `section/name`. A name with a `{placeholder}` is a family: `throughput/tokens_wasted_per_s/{reason}`
stands for one series per reason. A **total** counts from the start of its process; the collector continues it over
restarts and derives its rate `..._per_s`, so that a role only counts.

Every series is plotted over each of the axes `step`, `wall_s`, `tokens`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Across = Literal["sum", "mean", "max", "last"]

SECTIONS: dict[str, str] = {
    "throughput": "Tokens and episodes per second, and what a training step costs",
    "staleness": "How old the tokens are, in training steps",
    "buffer": "Where the prompt groups are, and what dropping them does to the data",
    "correction": "How far the behaviour policy is from the one that is trained",
    "reward": "What the agent achieves",
    "weights": "Updates of the weights and their transfer to the actors",
    "teacher": "How far the policy is from its teacher (learner.teacher)",
    "waits": "What each role waits for",
    "system": "Processes of the run",
}

AXES: dict[str, str] = {
    "step": "training steps applied: the policy version",
    "wall_s": "seconds since the start of the run",
    "tokens": "tokens trained on so far",
}

BUCKET_EDGES = (0, 1, 2, 3, 4, 8, 16)
"""Lower edges of the buckets of every staleness histogram; the last is open."""
BUCKETS = ("0", "1", "2", "3", "4_7", "8_15", "16_up")

EDGES: dict[str, dict[str, int]] = {
    "turn": {"1": 1, "2": 2, "3": 3, "4_7": 4, "8_up": 8},
    "position": {"1": 1, "2_3": 2, "4_15": 4, "16_63": 16, "64_255": 64, "256_up": 256},
}
"""Buckets of a token's turn in its row, and of its position in its turn, with the lowest of each, from 1."""

DROP_REASONS = ("stale", "filtered", "env_error", "wait_deadline", "guard", "poison", "discarded_branch")
WASTE_REASONS = (*DROP_REASONS, "late", "duplicate", "turns", "aborted", "masked")
RECORD_ENDS = (
    "kept", "continued", "longer", "stale", "anew", "failed", "diverged", "lost", "discarded_branch", "dropped",
)  # fmt: skip
"""What became of recorded turns (`buffer.turns`)."""
STATES = ("in_flight", "waiting", "assigned", "trained", "dropped")
STOP_REASONS = ("done", "max_turns", "max_tokens", "length")
FATES = ("generated", "trained", "dropped")

CAUSES: dict[str, str] = {
    "batch": "learner: the buffer has no complete batch within the bound",
    "publish": "learner: the new weights are being written",
    "checkpoint": "learner: the checkpoint is being written",
    "evaluation": "learner: the held-out set is being played",
    "ticket": "actor: free slots, but the buffer issues nothing",
    "weights": "actor: new weights are being loaded",
    "environment": "actor: every running episode is inside its environment",
    "teacher": "scorer: the teacher's servers do not answer",
    "groups": "scorer: no complete group is without scores",
    "put": "actor: the buffer has not acknowledged yet",
    "buffer": "any role: the buffer does not answer",
    "start": "any role: still starting",
}
"""Causes that roles report today, with their meaning; the families of `waits` accept any name."""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    unit: str
    meaning: str
    across: Across = "last"
    """How the values of several roles (mostly actors) are combined."""
    total: bool = False
    """Whether it counts up from the start of its process."""

    @property
    def section(self) -> str:
        return self.name.split("/", 1)[0]

    @property
    def family(self) -> bool:
        return "{" in self.name


_OPEN = r"[^/\s{}]+"
PLACEHOLDERS: dict[str, tuple[str, ...] | None] = {
    "reason": WASTE_REASONS,
    "drop": DROP_REASONS,
    "record": RECORD_ENDS,
    "state": STATES,
    "bucket": BUCKETS,
    "turn": tuple(EDGES["turn"]),
    "position": tuple(EDGES["position"]),
    "fate": FATES,
    "stop": STOP_REASONS,
    "cause": None,
    "env": None,
    "reward": None,
    "correction": None,
    "metric": None,
    "role": None,
    "tool": None,
    "set": None,
    "k": None,
    "sink": None,
}
"""Names allowed in each placeholder; None: any name without a slash or a space."""


def _total(name: str, unit: str, meaning: str) -> list[Series]:
    return [
        Series(name, unit, f"{meaning}, since the start", "sum", total=True),
        Series(rate_name(name), f"{unit}/s", f"{meaning}, per second", "sum"),
    ]


def rate_name(total: str) -> str:
    """The name of the rate of a total.

    >>> rate_name("throughput/tokens_wasted/stale")
    'throughput/tokens_wasted_per_s/stale'
    """
    section, name, *rest = total.split("/")
    return "/".join((section, f"{name}_per_s", *rest))


_TABLE: list[Series] = [
    *_total("throughput/tokens_generated", "tokens", "policy tokens sampled by the actors"),
    *_total("throughput/tokens_trained", "tokens", "policy tokens that carried loss in an applied step"),
    *_total("throughput/tokens_wasted/{reason}", "tokens", "policy tokens sampled and never trained on, by reason"),
    *_total("throughput/episodes", "episodes", "episodes finished by the actors"),
    *_total("throughput/prefix_breaks", "rows", "rows started because the chat template changed earlier text"),
    *_total("throughput/begun_again", "episodes", "episodes that started over: what was recorded of them did not fit"),
    *_total("throughput/compactions", "rows", "rows that ended with a summary of the conversation (env.compact)"),
    *_total("throughput/compacted_from", "tokens", "length of the rows that ended with a summary"),
    *_total("throughput/compacted_to", "tokens", "length of the prompts that began from a summary"),
    *_total("throughput/environment_episodes/{env}", "episodes", "episodes that ended, by environment"),
    *_total("throughput/environment_s/{env}", "s", "seconds of these episodes in their environment"),
    *_total("throughput/tool_calls/{tool}", "calls", "calls of a tool, by name; `other` after 50 names"),
    *_total("throughput/tool_s/{tool}", "s", "seconds of these calls"),
    *_total(
        "throughput/ignored_constraints", "requests", "requests of agents whose constraints on sampling were ignored"
    ),
    Series("throughput/step_s", "s", "wall time from the end of one training step to the end of the next"),
    Series("throughput/compute_s", "s", "of step_s, forward, backward and optimizer"),
    Series("throughput/proximal_s", "s", "of step_s, the forward pass for the proximal logprobs"),
    Series("throughput/real_token_share", "share", "tokens computed by the learner that are not padding"),
    Series("throughput/requests_running", "requests", "sequences that the engines are generating", "sum"),
    Series("throughput/requests_waiting", "requests", "sequences that wait for a slot in the engines", "sum"),
    Series("throughput/slots", "episodes", "maximum of concurrent episodes of the actors", "sum"),
    Series("throughput/slots_busy", "share", "actor slots in use", "mean"),
    Series("throughput/kv_use", "share", "KV cache of the engines in use", "mean"),
    Series("staleness/mean", "steps", "mean over the trained tokens"),
    Series("staleness/max", "steps", "largest over the trained tokens", "max"),
    Series("staleness/bound", "steps", "buffer.max_staleness; under auto that of the batch"),
    Series("staleness/target", "steps", "under buffer.max_staleness: auto, the bound under which groups are admitted"),
    Series("throughput/slots_in_force", "tickets", "under launch.tuning: auto, those that one actor may hold"),
    Series("staleness/trained_tokens/{bucket}", "share", "trained tokens of the step, by staleness"),
    Series("staleness/in_queue/{bucket}", "groups", "complete groups that wait, by current staleness", "sum"),
    Series("staleness/in_flight/{bucket}", "groups", "incomplete groups, by current staleness", "sum"),
    Series("staleness/versions_per_episode", "versions", "policy versions that sampled a trained trajectory, mean"),
    *[Series(f"buffer/groups/{s}", "groups", f"groups that are {s.replace('_', ' ')}", "sum") for s in STATES],
    Series("buffer/groups/issued", "groups", "groups ever issued: the sum of the five states", "sum"),
    Series("buffer/dropped/{drop}", "groups", "groups dropped, by reason, since the start", "sum"),
    Series("buffer/demonstrations", "demonstrations", "demonstrations that the batches have taken", "sum"),
    Series("buffer/fill", "share", "part of buffer.capacity in use", "max"),
    Series("buffer/trajectories", "trajectories", "places of buffer.capacity in use", "sum"),
    Series("buffer/replay/groups", "groups", "used groups that the step's batch got beside new ones (buffer.replay)"),
    Series("buffer/replay/age", "steps", "their staleness, by the oldest token of each, mean"),
    Series("buffer/replay/ess", "share", "effective sample size of their weights in the loss over their number"),
    *_total(
        "buffer/scored", "groups", "groups whose scores a teacher's server gave (learner.teacher.scored_by: servers)"
    ),
    *_total("buffer/scores_late", "groups", "scores that were discarded: others came first, or the group had ended"),
    Series("buffer/unscored", "groups", "complete groups that wait for their scores now"),
    *_total("buffer/yielded", "groups", "used groups that ended to make room for new ones (buffer.replay)"),
    Series("buffer/leases", "tickets", "tickets leased to actors now", "sum"),
    Series("buffer/disk_bytes", "bytes", "payloads on disk", "sum"),
    Series("buffer/commit_ms", "ms", "duration of one group commit of the ledger, mean", "max"),
    *_total("buffer/puts", "trajectories", "trajectories stored"),
    *_total("buffer/duplicates", "trajectories", "trajectories put again with the same digest: not stored"),
    *_total("buffer/late", "trajectories", "trajectories that came too late or with another digest: discarded"),
    *_total("buffer/reissued", "tickets", "tickets issued again after a lapsed lease or a failed environment"),
    *_total("buffer/recorded/records", "records", "samples and answers of episodes that were recorded (buffer.turns)"),
    *_total("buffer/recorded/revoked", "records", "turns of attempts that no longer held their ticket: not recorded"),
    *_total(
        "buffer/recorded/full", "records", "turns that found no room on the disk: their episode is recorded no further"
    ),
    *_total(
        "buffer/recorded/resumed", "tickets", "tickets issued with recorded turns, after which the episode continues"
    ),
    *_total("buffer/recorded/carried_tokens", "tokens", "sampled tokens that these carried, not sampled again"),
    Series("buffer/recorded/{record}", "records", "recorded so far, by what became of them", "sum"),
    *_total("buffer/refused", "messages", "malformed messages refused"),
    *_total("buffer/wrong_actor", "messages", "puts, failures and releases of another actor's tickets: refused"),
    *_total("buffer/old_tokens", "trajectories", "trajectories with tokens older than their ticket allows: refused"),
    *_total("buffer/renewals_failed", "rounds", "rounds in which an actor could not renew its leases"),
    *_total("buffer/env_failures", "episodes", "episodes whose environment failed"),
    Series("buffer/env_failing", "share", "failed environments among the last env.failure_window attempts", "max"),
    Series("buffer/length/{fate}", "tokens", "policy tokens per trajectory, mean since the start", "sum"),
    Series("buffer/turns/{fate}", "turns", "assistant turns per trajectory, mean since the start", "sum"),
    Series("buffer/reward/{fate}", "reward", "reward per trajectory, mean since the start", "sum"),
    Series("buffer/count/{fate}", "trajectories", "trajectories that these means are over", "sum"),
    Series("buffer/env_count/{fate}/{env}", "trajectories", "of them, by environment", "sum"),
    Series("correction/ess", "share", "effective sample size of the importance weights over the number of tokens"),
    Series("correction/sequence_ess", "share", "the same over rows, each weighing the product of its tokens' ratios"),
    Series("correction/mismatch_kl", "nats", "KL(behaviour || proximal), k3 estimate over trained tokens"),
    Series("correction/engine_mismatch_kl", "nats", "the same over tokens of staleness 0: engine against learner"),
    Series(
        "correction/engine_mismatch_mean", "nats", "|engine's logprob - learner's|, mean over tokens of staleness 0"
    ),
    Series("correction/engine_mismatch_max", "nats", "its largest value", "max"),
    Series("correction/engine_mismatch_tokens", "tokens", "tokens of staleness 0 in the batch"),
    Series("correction/ratio_mean", "ratio", "proximal / behaviour, mean over trained tokens"),
    Series("correction/ratio_p99", "ratio", "its 99th percentile"),
    Series("correction/ratio_max", "ratio", "its largest value", "max"),
    Series("correction/ratio_truncated", "share", "tokens whose importance weight was cut or rejected"),
    Series("correction/ratio_min", "ratio", "its smallest value"),
    Series("correction/ratio_above_2", "share", "trained tokens with a ratio above 2"),
    Series("correction/ratio_below_half", "share", "trained tokens with a ratio below 1/2"),
    Series("correction/mismatch_k1", "nats", "mean of log(behaviour / proximal): the same KL, unbiased and noisier"),
    Series("correction/kept", "share", "trained tokens that the corrections keep"),
    Series(
        "correction/kept_ids", "ids", "truncated sampling: ids that a token was drawn from, mean over those recorded"
    ),
    Series("correction/beyond_max_kept", "tokens", "of the batch, without loss: more ids kept than `actors.max_kept`"),
    Series("correction/weights_mean", "ratio", "importance weight after the correction, mean over trained tokens"),
    Series("correction/clip_fraction", "share", "trained tokens whose loss is clipped"),
    Series(
        "correction/approx_kl", "nats", "KL(p || current), k3 estimate over trained tokens, p of `learner.proximal`"
    ),
    Series("correction/applied/{correction}/{metric}", "1", "reported by one importance correction"),
    *[
        Series(f"correction/{metric}/{{bucket}}", unit, f"{meaning}, by staleness")
        for metric, unit, meaning in (
            ("ess", "share", "effective sample size"),
            ("mismatch_kl", "nats", "KL(behaviour || proximal)"),
            ("mismatch_k1", "nats", "mean of log(behaviour / proximal)"),
            ("clip_fraction", "share", "clipped tokens"),
            ("ratio_p99", "ratio", "99th percentile of proximal / behaviour"),
            ("ratio_max", "ratio", "largest proximal / behaviour"),
            ("ratio_min", "ratio", "smallest proximal / behaviour"),
            ("ratio_above_2", "share", "tokens with a ratio above 2"),
            ("ratio_below_half", "share", "tokens with a ratio below 1/2"),
        )
    ],
    Series("reward/mean", "reward", "mean over the step's trajectories"),
    Series("reward/std", "reward", "standard deviation over the step's trajectories"),
    Series("reward/shaped", "reward", "mean after learner.shaping"),
    Series("reward/by_name/{reward}", "reward", "mean of one named reward"),
    Series("reward/success", "share", "trajectories of the step that succeeded (eval.success)"),
    Series("reward/success/{env}", "share", "the same, by environment"),
    Series("reward/mean/{env}", "reward", "mean reward, by environment"),
    Series("reward/zero_variance_groups", "share", "groups of the step whose rewards are all equal: no gradient"),
    Series("reward/held_out_success_sampled", "share", "sampled episodes of the first held-out set that succeeded"),
    Series("reward/held_out_success_greedy", "share", "greedy episodes of the first held-out set that succeeded"),
    *[
        Series(f"reward/held_out/{{set}}/{name}", unit, f"of one held-out set: {meaning}")
        for name, unit, meaning in (
            ("sampled", "share", "success of the sampled episodes"),
            ("sampled_low", "share", "lower end of the 95% interval of `sampled`"),
            ("sampled_high", "share", "upper end of the 95% interval of `sampled`"),
            ("sampled_reward", "reward", "mean reward of the sampled episodes"),
            ("greedy", "share", "success of the greedy episodes"),
            ("greedy_low", "share", "lower end of the 95% interval of `greedy`"),
            ("greedy_high", "share", "upper end of the 95% interval of `greedy`"),
            ("greedy_reward", "reward", "mean reward of the greedy episodes"),
            ("failed", "episodes", "episodes that failed in their environment and do not count"),
            ("skipped", "evaluations", "evaluations skipped because one was still open"),
            ("seconds", "s", "seconds from the evaluation's opening to its last episode"),
        )
    ],
    Series("reward/held_out/{set}/pass_at/{k}", "share", "of one held-out set: pass@k of the sampled episodes"),
    Series("reward/turns", "turns", "assistant turns per trajectory of the step"),
    Series("reward/length", "tokens", "policy tokens per trajectory of the step"),
    Series("reward/truncated", "share", "trajectories ended by a limit of turns or tokens"),
    Series("reward/stopped/{stop}", "share", "trajectories of the step, by what ended them"),
    Series("reward/advantage_std", "1", "standard deviation of the advantages over the trained tokens"),
    Series("weights/loss", "1", "the objective that was minimised"),
    Series("weights/policy_loss", "1", "its policy part"),
    Series("weights/loss/{metric}", "1", "reported by the policy loss"),
    Series("weights/demonstrations/loss", "nats", "cross entropy of demonstrations before the update, per token"),
    Series("weights/demonstrations/tokens", "tokens", "tokens of demonstrations that carried loss in the step"),
    Series("weights/demonstrations/longest", "tokens", "the longest row of a demonstration in the step", "max"),
    Series("weights/demonstrations/weight", "1", "their weight beside the groups (learner.demonstrations)"),
    Series("weights/reference_kl", "nats", "KL to the reference model (learner.kl_coef)"),
    Series("weights/kl_coef", "1", "weight of the KL term (learner.kl_controller)"),
    Series("weights/value_loss", "1", "the critic's loss (learner.critic)"),
    Series("weights/explained_variance", "share", "part of the returns' variance that the critic's values explain"),
    Series("weights/value_mean", "reward", "the critic's values at the start of the step, mean over trained tokens"),
    Series("weights/critic_grad_norm", "1", "the critic's gradient norm before clipping; of a shared one, its head's"),
    Series("weights/entropy", "nats", "entropy of the policy per trained token"),
    Series("weights/grad_norm", "1", "gradient norm before clipping"),
    Series("weights/lr", "1", "learning rate"),
    Series("weights/lr_scale", "ratio", "factor of the learning rate by the effective sample size (learner.ess_lr)"),
    Series("weights/skipped", "batches", "batches skipped by the guard, since the start", "sum"),
    Series(
        "weights/without_gradient",
        "steps",
        "applied steps that changed nothing, as their gradient was exactly 0",
        "max",
    ),
    Series(
        "teacher/loss", "1", "the teacher's term of the objective that was minimised; 0 where it is in the advantage"
    ),
    Series(
        "teacher/divergence", "nats", "learner.teacher.divergence over the whole vocabulary, mean per trained token"
    ),
    Series(
        "teacher/lower_bound", "nats", "the same under over: top_k, which cannot give more than a lower bound of it"
    ),
    Series("teacher/reverse_kl", "nats", "KL(policy || teacher) over the whole vocabulary, mean per trained token"),
    Series("teacher/forward_kl", "nats", "KL(teacher || policy), likewise"),
    *_total("teacher/scored_tokens", "tokens", "sampled tokens that the teacher's servers scored"),
    Series("teacher/score_s", "s", "from a group's lease to its stored scores, mean since the scorer began", "max"),
    *_total("teacher/server_failures", "requests", "requests that a server of the teacher did not answer"),
    Series(
        "teacher/log_ratio",
        "nats",
        "log policy - log teacher at the trained tokens, mean; with scored_by servers an estimate of the KL",
    ),
    Series("teacher/entropy", "nats", "entropy of the teacher per trained token; weights/entropy is the policy's"),
    Series("teacher/hinted", "share", "rows in which a teacher that is the policy itself is shown something"),
    Series("teacher/hint_tokens", "tokens", "of what it is shown, mean over these rows"),
    Series("teacher/agreement", "share", "trained tokens where both find the same word most likely"),
    Series("teacher/reverse_kl_by_turn/{turn}", "nats", "teacher/reverse_kl by the turn in the row"),
    Series("teacher/reverse_kl_by_position/{position}", "nats", "teacher/reverse_kl by the position in the turn"),
    Series("weights/publish_s", "s", "seconds to publish one policy version"),
    Series("weights/published_version", "version", "the latest version published", "max"),
    Series("weights/bytes", "bytes", "size of one published version"),
    Series("weights/sent_bytes", "bytes", "bytes sent to other hosts since the start", "sum"),
    Series(
        "weights/delta_bytes", "bytes", "size of the delta between published versions; 0: hosts fetch the full file"
    ),
    Series("weights/deltas_offered", "versions", "versions that other hosts fetched as a delta", "sum"),
    Series("weights/fulls_offered", "versions", "versions that other hosts fetched in full", "sum"),
    Series("weights/requests_refused", "requests", "malformed requests refused by the weights server", "sum"),
    Series("weights/held_version", "version", "version that the actors hold, mean", "mean"),
    Series("weights/load_s", "s", "seconds an actor took to load the latest weights", "max"),
    Series("weights/paused_share", "share", "time in which an actor pauses for new weights", "mean"),
    *_total("weights/updates", "updates", "updates loaded by the actors"),
    Series("waits/learner/{cause}", "share", "of the learner's time, by what it waits for"),
    Series("waits/actor/{cause}", "share", "of the actors' time, by what they wait for, mean over the actors"),
    Series("waits/buffer/{cause}", "share", "of the buffer's time, by what it waits for"),
    Series("system/cpu/{role}", "cores", "CPU of one process and its children"),
    Series("system/rss_bytes/{role}", "bytes", "resident memory of one process and its children"),
    Series("system/restarts", "restarts", "processes restarted by the launcher, since the start"),
    Series("system/restarts/{role}", "restarts", "the same, of one process"),
    Series("system/reports_lost", "messages", "messages to the launcher that were dropped", "sum"),
    Series("system/unknown_series", "values", "values whose name is not in the table of series", "sum"),
    Series("system/sink_failures/{sink}", "calls", "calls of a metrics sink that failed; it is dropped"),
]

SERIES: dict[str, Series] = {s.name: s for s in _TABLE}
if len(SERIES) != len(_TABLE):
    raise ValueError("asyncrl.tracking.series: a name is in the table twice")


def _pattern(name: str) -> re.Pattern[str]:
    def one(match: re.Match[str]) -> str:
        allowed = PLACEHOLDERS[match.group(1)]
        return _OPEN if allowed is None else "(?:" + "|".join(map(re.escape, allowed)) + ")"

    return re.compile(re.sub(r"\{(\w+)\}", one, name))


_FAMILIES = [(_pattern(s.name), s) for s in _TABLE if s.family]


@lru_cache(maxsize=4096)
def find(name: str) -> Series | None:
    """The entry of the table for a series or its family; None if there is none.

    >>> find("throughput/tokens_wasted/stale").unit
    'tokens'
    >>> find("throughput/tokens_wasted/boredom") is None
    True
    """
    if name in SERIES and not SERIES[name].family:
        return SERIES[name]
    return next((s for pattern, s in _FAMILIES if pattern.fullmatch(name)), None)


def check(names: Iterable[str]) -> None:
    """Raise ValueError if a name is not in the table; for tests of code that reports series."""
    unknown = sorted(n for n in names if find(n) is None)
    if unknown:
        raise ValueError(f"no such series: {', '.join(unknown)}. Use one of asyncrl/tracking/series.py, or add it.")


def bucket(staleness: int) -> str:
    """The bucket of a staleness (in training steps, not negative) in every histogram.

    >>> [bucket(s) for s in (0, 3, 4, 7, 8, 100)]
    ['0', '3', '4_7', '4_7', '8_15', '16_up']
    """
    if staleness < 0:
        raise ValueError(f"staleness is {staleness}: the learner cannot be behind a token that it consumes")
    return BUCKETS[bisect_right(BUCKET_EDGES, staleness) - 1]


def histogram(family: str, counts: dict[int, int]) -> dict[str, float]:
    """Counts by staleness as the series of one family: `histogram("staleness/in_queue", {0: 5, 7: 1})`.

    It has every bucket, so that one that becomes empty returns to 0.
    """
    values = dict.fromkeys((f"{family}/{b}" for b in BUCKETS), 0.0)
    for staleness, n in counts.items():
        values[f"{family}/{bucket(staleness)}"] += n
    return values
