"""Names of the learner's choices, checked before anything starts: their tables import torch, which takes seconds.

Options and the user's own functions are checked by `--dry-run`, and by the learner before it does anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.plugins import resolve

NAMES: Mapping[str, tuple[str, ...]] = {
    "backend": ("torch", "fsdp2", "megatron"),
    "loss": (
        "ppo", "decoupled_ppo", "gspo", "luspo", "gmpo", "sapo", "cispo", "gpg", "reinforce", "topr", "rollout_is",
        "vespo", "dro", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "sft",
    ),
    "advantage": (
        "grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "max_rl", "gdpo", "reinforce_pp_baseline",
        "reinforce_pp", "remax", "gae", "vapo_gae", "vtrace", "optimal_token_baseline", "turn_returns", "turn_grpo",
        "turn_gae", "gigpo",
    ),
    "aggregation": (
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean",
    ),
    "kl": ("k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"),
    "corrections": ("none", "tis", "mis", "icepop", "clamp", "kl_reject", "veto", "opsm", "m2po"),
    "shaping": ("overlong_penalty", "stop_properly", "clip", "length_penalty"),
}  # fmt: skip
"""By field of `learner`: the keys of its table, in the table's order."""


def check_learner_names(config: Config) -> None:
    """Raises ConfigError, with the nearest name, for one that is neither known nor an import path."""
    for kind, field, name in _given(config):
        if ":" not in name:
            try:
                resolve(name, dict.fromkeys(NAMES[kind]), f"learner.{field}")
            except ValueError as error:
                raise ConfigError(str(error)) from error


def _given(config: Config) -> Iterator[tuple[str, str, str]]:
    """Key in `NAMES`, field below `learner`, and name of each choice; the learner refuses entries without one."""
    learner = config.learner
    for kind in ("backend", "loss", "advantage", "aggregation", "kl"):
        yield kind, kind, getattr(learner, kind)
    listed = {
        **{f"advantage_by_env.{env}": ("advantage", entry) for env, entry in learner.advantage_by_env.items()},
        **{f"corrections[{i}]": ("corrections", entry) for i, entry in enumerate(learner.corrections)},
        **{f"shaping[{i}]": ("shaping", entry) for i, entry in enumerate(learner.shaping)},
    }
    for field, (kind, entry) in listed.items():
        if isinstance(name := entry.get("name"), str):
            yield kind, field, name
