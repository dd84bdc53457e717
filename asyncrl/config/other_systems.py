"""What the keys of other systems are called here, for those who come from there (docs/reference/other-systems.md)."""

from __future__ import annotations

KEYS: dict[str, str] = {
    # TRL's GRPOConfig, transformers' TrainingArguments
    "learning_rate": "learner.lr",
    "num_generations": "learner.group_size",
    "beta": "learner.kl_coef",
    "epsilon": "learner.loss_options.clip_low",
    "epsilon_high": "learner.loss_options.clip_high",
    "max_completion_length": "actors.max_new_tokens",
    "num_train_epochs": "learner.steps",
    "per_device_train_batch_size": "learner.groups_per_step",
    "reward_funcs": "env.options.score",
    "report_to": "tracking.sinks",
    "save_steps": "learner.checkpoint_every",
    "output_dir": "launch.runs_dir",
    "loss_type": "learner.loss",
    "use_vllm": "actors.engine",
    "model_name_or_path": "model.path",
    "dataset_name": "data.options.path",
    "bf16": "model.dtype",
    # verl
    "total_epochs": "learner.steps",
    "total_training_steps": "learner.steps",
    "train_files": "data.options.path",
    "data.path": "data.options.path",
    "val_files": "data.options.held_out_path",
    "train_batch_size": "learner.groups_per_step",
    "ppo_mini_batch_size": "learner.minibatches",
    "max_prompt_length": "data.options.max_prompt_tokens",
    "max_response_length": "actors.max_new_tokens",
    "adv_estimator": "learner.advantage",
    "kl_loss_coef": "learner.kl_coef",
    "clip_ratio_low": "learner.loss_options.clip_low",
    "clip_ratio_high": "learner.loss_options.clip_high",
    "grad_clip": "learner.max_grad_norm",
    "save_freq": "learner.checkpoint_every",
    "test_freq": "eval.every",
    "tensor_model_parallel_size": "actors.engine_options.tensor_parallel",
    "gpu_memory_utilization": "actors.engine_options.gpu_memory",
    "n_gpus_per_node": "launch.gpus",
    "custom_reward_function": "env.options.score",
    "reward_fn": "env.options.score",
    # OpenRLHF
    "pretrain": "model.path",
    "prompt_data": "data.options.path",
    "n_samples_per_prompt": "learner.group_size",
    "actor_learning_rate": "learner.lr",
    "init_kl_coef": "learner.kl_coef",
    "rollout_batch_size": "learner.groups_per_step",
    # prime-rl, AReaL
    "rollouts_per_example": "learner.group_size",
    "n_samples": "learner.group_size",
    "max_async_level": "buffer.max_staleness",
    "max_head_offpolicyness": "buffer.max_staleness",
    "max_steps": "learner.steps",
}
"""The last part of a key of theirs -> the field that is set here for the same purpose; counts may differ."""
SECTIONS = ("actor_rollout_ref", "trainer", "algorithm", "custom_reward_function", "orchestrator", "rollout", "actor")
"""Sections of their files."""


def field_for(key: str) -> str:
    """The field here for a key of theirs, given with its sections; empty: none is known.

    >>> field_for("learner.learning_rate"), field_for("trainer.total_epochs"), field_for("learner.lrr")
    ('learner.lr', 'learner.steps', '')
    """
    return KEYS.get(key) or KEYS.get(key.rpartition(".")[2], "")


def is_theirs(key: str) -> bool:
    """Whether a key begins with a section of theirs.

    >>> is_theirs("actor_rollout_ref.rollout.n"), is_theirs("actors.slot")
    (True, False)
    """
    return key.partition(".")[0] in SECTIONS
