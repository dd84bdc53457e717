"""What `--resume` makes of a changed field. Every field of the config is in one of the three lists; a test holds that.

refused   what the ledger or the checkpoints hold was made with the previous value
branch    a training step that is redone would give other weights: if any recorded step is redone, a branch begins
free      it has no effect on what was recorded

`settings` are the fields of the second kind, with their values. The ledger keeps them with every start of the learner,
so that a change is noticed by the start that redoes steps, however often the run was killed in between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from asyncrl.config.loading import fields
from asyncrl.config.tree import Tree

C = TypeVar("C", bound=Tree)
Change = Literal["refused", "branch", "free"]

_REFUSED: Mapping[str, str] = {
    "model": "path dtype",
    "data": "source options seed curriculum curriculum_options on_step_end on_step_end_options demonstrations "
    "demonstrations_split",
    "env": "name options max_turns max_tokens compact compact_request group_score group_score_options "
    "group_score_weight",
    "buffer": "dir",
    "learner": "backend groups_per_step group_size greedy_baseline",
    "learner.demonstrations": "per_step",
    "learner.lora": "r lora_alpha use_rslora lora_dropout target_modules exclude_modules",
    "learner.teacher": "path scored_by update_rate shown answer_field",
    "launch": "name runs_dir",
}
_BRANCH: Mapping[str, str] = {
    "actors": "temperature tool_calls renderer stop_token_ids",
    "buffer": "max_staleness over_age",
    "learner": "backend_options ranks shard activation_checkpointing compile cpu_offload steps minibatches "
    "tokens_per_micro_batch lr warmup_steps schedule weight_decay betas max_grad_norm advantage advantage_options "
    "advantage_by_env loss loss_options corrections proximal aggregation aggregation_options entropy_coef shaping "
    "pf_ppo pf_ppo_power critic critic_lr critic_warmup_steps value_options kl_coef kl kl_options kl_in kl_unbiased "
    "kl_limit kl_controller kl_controller_options reference_every ess_lr ess_lr_base min_ess threads seed",
    "learner.demonstrations": "weight schedule",
    "launch": "ranks_per_node",
    "learner.teacher": "divergence jsd_beta over k top_k_of into coef reward_weight limit ratio_cap shown_as "
    "shown_tokens",
}
_FREE: Mapping[str, str] = {
    "model": "made_with",
    "env": "call_s max_reward workers worker_count retries max_failures failure_window on_failures",
    "actors": "count eval constraints engine engine_options slots max_slots top_p top_k min_p max_kept max_new_tokens "
    "seed threads episode_idle_s episode_s episode_max_s drain_s",
    "buffer": "capacity staleness_limit staleness_lr requeue wait_s mask_min_kept sampler max_uses replay "
    "replay_priority replay_half_life replay_exponent replay_beta filters filter_max_ratio on_starved lease_s keep "
    "fsync fsync_interval_s commit_ms max_disk_gb turns turns_auto_s turn_max_kb",
    "learner": "collective_s unsafe batch_retries max_skipped checkpoint_every checkpoint_s keep_checkpoints "
    "gpu_memory",
    "learner.teacher": "servers dialect server_s scorers score_slots",
    "weights": "every kv drain channel full_every fanout",
    "eval": "tasks samples greedy success sets every share stop_at patience keep_best final",
    "tracking": "sinks project wandb_mode system_s trace_every rollouts rollouts_mb held_out",
    "launch": "backend gpus host cpus restarts restart_window_s start_s stop_s stall_s on_stall try_reset "
    "memory_check tuning seed",
    "ray": "address cpus resources environment",
}


def _named(lists: Mapping[str, str]) -> frozenset[str]:
    return frozenset(f"{section}.{name}" for section, names in lists.items() for name in names.split())


FIELDS: Mapping[Change, frozenset[str]] = {
    "refused": _named(_REFUSED),
    "branch": _named(_BRANCH),
    "free": _named(_FREE),
}
"""Every field of the config. `launch.seed` and `launch.tuning` are free because the fields that they set are compared
themselves."""
_RENDERING = ("actors.tool_calls", "actors.renderer", "actors.stop_token_ids")
"""They decide which ids a demonstration becomes, and which of them carry loss, whenever it is rendered."""
ONLY_IF: Mapping[str, str] = {
    **dict.fromkeys(_RENDERING, "`data.demonstrations` is set"),
    "learner.steps": "`learner.schedule` or `learner.demonstrations.schedule` is not `constant`",
    "buffer.max_staleness": "`buffer.over_age` is `mask`",
    "buffer.over_age": "`mask` is the previous value or the new one",
    "launch.ranks_per_node": "`learner.shard` is `node`",
}
"""When a field of the kind `branch` has an effect on a step; otherwise it is free."""


def change(field: str) -> Change:
    """The list that names it."""
    return next(kind for kind, named in FIELDS.items() if field in named)


def settings(config: Tree) -> dict[str, Any]:
    """What decides the result of a training step on given data, by field."""
    values = config.model_dump(mode="json")
    found = {field: _at(values, field) for field, _ in fields(Tree) if field in FIELDS["branch"]}
    if config.learner.schedule == config.learner.demonstrations.schedule == "constant":
        del found["learner.steps"]
    if not config.data.demonstrations:
        found = {field: value for field, value in found.items() if field not in _RENDERING}
    if not config.learner.teacher.path:
        found = {field: value for field, value in found.items() if not field.startswith("learner.teacher.")}
    if config.learner.shard != "node":
        del found["launch.ranks_per_node"]
    if config.buffer.over_age != "mask":
        del found["buffer.max_staleness"]
        found["buffer.over_age"] = UNMASKED
    return found


def text(config: Tree) -> str:
    """The settings as the ledger keeps them: JSON."""
    return json.dumps(settings(config), sort_keys=True)


def under(config: C, had: Mapping[str, Any]) -> C:
    """The config with these settings; what `settings` left out stays as it is."""
    values = config.model_dump(mode="json")
    for field, value in had.items():
        *sections, name = field.split(".")
        _at(values, ".".join(sections))[name] = value
    if had.get("buffer.over_age") == UNMASKED:
        values["buffer"]["over_age"] = config.buffer.over_age if config.buffer.over_age != "mask" else "drop"
    changed = {field.split(".")[0] for field in had}
    return config.model_copy(
        update={name: type(getattr(config, name)).model_validate(values[name]) for name in changed}
    )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Sentences that name each setting that differs, with both values.

    >>> differences({"learner.lr": 0.001, "learner.steps": 80}, {"learner.lr": 0.002})
    ['learner.lr was 0.001 and is 0.002', 'learner.steps was 80 and has no effect now']
    """
    changed = [name for name in sorted({*before, *now}) if before.get(name, _NONE) != now.get(name, _NONE)]
    return [f"{name} {_said(before, name, 'was', 'had no effect')} and {_said(now, name, 'is', 'has no effect now')}"
            for name in changed]  # fmt: skip


UNMASKED = "without mask"
"""Stands for every other value of `buffer.over_age`."""
_NONE = object()
_SHOWN = 80
"""Characters of a value in a sentence."""


def _said(values: Mapping[str, Any], name: str, verb: str, without: str) -> str:
    return f"{verb} {json.dumps(values[name]):.{_SHOWN}}" if name in values else without


def _at(values: Any, field: str) -> Any:
    for name in field.split("."):
        values = values[name]
    return values
