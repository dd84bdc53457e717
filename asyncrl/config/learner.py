"""The learner's part of the configuration tree."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from asyncrl.config.sections import Section


class LoraConfig(Section):
    """Fields of peft's LoraConfig."""

    r: int = Field(0, ge=0)
    """Rank of the adapters that train instead of the weights (LoRA, extra `lora`); 0: all weights train. The frozen
    base is the reference model of the KL term. Needs about ten times the learning rate."""
    lora_alpha: float = Field(32.0, gt=0)
    """The output of an adapter is multiplied by `lora_alpha / r`."""
    use_rslora: bool = False
    """Multiply by `lora_alpha / sqrt(r)` instead, which suits large ranks (2312.03732)."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Must be 0: with dropout the policy that is trained is not the one that samples."""
    target_modules: tuple[str, ...] = ()
    """Matrices that get an adapter, by the end of their names, such as `q_proj`; empty: all matrices of the layers."""
    exclude_modules: tuple[str, ...] = ()
    """Matrices among these that get no adapter."""


class DemonstrationsConfig(Section):
    """How `data.demonstrations` are trained on."""

    per_step: int = Field(16, ge=1, le=65_536)
    """Demonstrations in one batch: under `learner.loss: sft` the whole batch, otherwise beside its groups."""
    weight: float = Field(0.1, ge=0)
    """Weight of their cross entropy beside the groups' loss; without effect under `learner.loss: sft`."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """That weight over the run: constant, or falling so that it is 0 after `learner.steps`."""


POLICY = "policy"
"""`learner.teacher.path` of a teacher that is the policy itself."""
PLACE = "{shown}"
"""In `learner.teacher.shown_as`, where what is shown stands."""


class TeacherConfig(Section):
    path: str = ""
    """A model that the policy learns from (docs/how-to/distillation.md): a Hugging Face folder or hub name, or a
    checkpoint of a run, with the policy's vocabulary and chat template. policy: the policy itself, which is shown more
    than when it answers (`shown`). Empty: no teacher."""
    update_rate: float = Field(1.0, ge=0, le=1)
    """Under `path: policy`, the share of the policy in the teacher's new weights after each training step: 1 is the
    policy itself, below 1 a moving average of it, 0 the run's first model."""
    shown: Literal["answer", "feedback", "nothing"] = "answer"
    """Under `path: policy`, what the teacher reads at the end of the user's message: a field of the task's record
    (`answer_field`), or the environment's last messages of the episode (Turn.messages). Where an episode has none,
    its tokens do not count. nothing: the same as the policy."""
    answer_field: str = Field("answer", min_length=1)
    """The field of the task's record that `shown: answer` shows."""
    shown_as: str = ""
    """The text that is added to the user's message, with {shown} in it. Empty: a sentence for `answer`, or one for
    `feedback`."""
    shown_tokens: int = Field(1024, ge=1, le=1 << 16)
    """Most tokens of what is shown; of a longer one the first are."""
    scored_by: Literal["learner", "servers"] = "learner"
    """Where the teacher computes. learner: in the learner's process. servers: behind HTTP (`servers`), asked by
    processes of the run (`scorers`) before a group is trained on; `path` then only names its tokenizer."""
    servers: tuple[str, ...] = ()
    """URLs of the teacher's servers, which all serve the same model, such as http://gpu-7:8000."""
    dialect: Literal["vllm", "sglang"] = "vllm"
    """How these are asked: vLLM's completions with prompt_logprobs, or SGLang's generate with return_logprob."""
    server_s: float = Field(120.0, gt=0, le=86_400)
    """Seconds that a server has for the tokens of one row."""
    scorers: int = Field(1, ge=1, le=1024)
    """Processes that ask the servers."""
    score_slots: int = Field(8, ge=1, le=256)
    """Groups that one of them has in work at the same time."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """What is minimised: KL(policy || teacher), KL(teacher || policy), or a divergence between them."""
    jsd_beta: float = Field(0.5, gt=0, lt=1)
    """The teacher's share of the mixture in `jsd`."""
    over: Literal["vocabulary", "top_k", "token"] = "vocabulary"
    """Words that the divergence is computed over: all of them; the `k` most likely ones and all others as one, which is
    a lower bound; or the sampled token alone, an estimate by policy gradient."""
    k: int = Field(20, ge=1)
    """Words that `over: top_k` compares one by one; all others are merged into one."""
    top_k_of: Literal["teacher", "student"] = "teacher"
    """Whose most likely words these are."""
    into: Literal["loss", "advantage"] = "loss"
    """Add the divergence to the loss, or to each token's advantage, from the sampled token."""
    coef: float = Field(1.0, ge=0)
    """Weight of the divergence; 0 measures it only."""
    reward_weight: float = Field(0.0, ge=0)
    """Factor of the advantages that come from the task's reward, with a teacher; 0 learns from the teacher alone."""
    limit: float = Field(10.0, gt=0)
    """Largest size of a token's advantage under `over: token`."""
    ratio_cap: float = Field(2.0, gt=0)
    """Under `over: token` in the loss, upper bound of the importance weight of a token that another policy sampled."""

    @property
    def moves(self) -> bool:
        """Whether the teacher is the policy itself, or an average of it."""
        return self.path == POLICY

    def copied(self, minibatches: int) -> bool:
        """Whether one that moves has weights of its own."""
        return self.update_rate < 1 or minibatches > 1

    @property
    def hints(self) -> bool:
        """Whether it reads more than the policy does."""
        return self.moves and self.shown != "nothing"


class LearnerConfig(Section):
    backend: str = "torch"
    """What computes: `torch` (one process), `fsdp2` (parameters sharded over `ranks`), `megatron` (Megatron-core, extra
    `megatron`) or `package.module:Name`."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the backend. megatron: tensor_parallel (1), pipeline_parallel (1), sequence_parallel (false),
    distributed_optimizer (false); docs/explanation/learner.md."""
    ranks: int = Field(1, ge=1)
    """Processes that train together; above 1 with `fsdp2` or `megatron`. It changes the result of a step only by
    rounding."""
    shard: Literal["all", "node"] = "all"
    """What `fsdp2` shards parameters, gradients and optimizer state over: all ranks, or the ranks of one node, so that
    each node holds the whole model and only gradients cross between nodes (`launch.ranks_per_node`)."""
    collective_s: float = Field(600.0, gt=0)
    """Seconds that a rank waits for the others in one collective before all ranks are restarted."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it. none: nothing. full (or true): each layer's
    activations; a third more computation. selective: the same, except attention, whose result is kept: little more
    memory than full, and at long rows most of what full computes twice is computed once."""
    compile: bool = False
    """Compile the decoder's layers with torch.compile; with `torch` and `fsdp2`. On a CPU it needs a C++ compiler, and
    saves memory rather than time (docs/explanation/learner.md)."""
    lora: LoraConfig = LoraConfig()
    cpu_offload: bool = False
    """With `fsdp2`, keep parameters, gradients and optimizer state in CPU memory; a layer moves to the GPU to run."""
    steps: int = Field(100, ge=0)
    """Training steps of the run: the policy version at its end."""
    groups_per_step: int = Field(16, ge=1)
    """Prompt groups in one batch."""
    group_size: int = Field(8, ge=1)
    """Trajectories of one prompt."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates in one training step; each uses an equal share of the groups."""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Maximum of tokens in one forward and backward pass; a longer row is a pass of its own."""
    lr: float = Field(1e-6, ge=0)
    """Learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer updates over which the learning rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate after the warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A gradient of a larger norm is scaled down to this norm."""
    advantage: str = "grpo"
    """Advantage estimator, by name (docs/reference/algorithms.md) or import path."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the estimator."""
    advantage_by_env: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Other estimators for single environments, by the environment's name (in a mix, or `env.name`): each a name and
    options. An estimator sees only its environment's part of the batch."""
    loss: str = "decoupled_ppo"
    """Policy loss, by name or import path. sft: cross entropy on `data.demonstrations` alone, without groups."""
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the loss."""
    corrections: tuple[dict[str, Any], ...] = ({"name": "tis", "level": "token", "cap": 2.0},)
    """Importance corrections, applied together: each a name and its options. Empty: none."""
    proximal: Literal["recompute", "approximate", "behaviour"] = "recompute"
    """The policy in the denominator of the loss's ratio. recompute: the learner at the start of the step. approximate:
    the same, interpolated without the extra forward pass (A-3PO); with one update per step no pass is needed anyway.
    behaviour: the policy that sampled the token, as in plain PPO; corrections are then 1: stale data need `unsafe`."""
    aggregation: str = "token_mean"
    """How the loss per token becomes one number."""
    aggregation_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the aggregation."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    shaping: tuple[dict[str, Any], ...] = ()
    """Transformations of an episode's reward before advantages are computed, applied in order: each a name
    (docs/reference/algorithms.md) or import path and its options. Filters and metrics use the reward before them."""
    greedy_baseline: bool = False
    """Play the first trajectory of every group greedily: its reward is the baseline that `advantage: remax` subtracts,
    and its tokens carry no loss."""
    pf_ppo: Literal["off", "pow", "max_min", "max_random"] = "off"
    """Resample the episodes of a batch with replacement by reward (PF-PPO): one that is drawn twice counts twice in the
    loss, one that is not drawn does not count."""
    pf_ppo_power: float = Field(2.0, gt=0)
    """Under `pf_ppo: pow`, an episode is drawn in proportion to the absolute value of its reward to this power."""
    critic: Literal["none", "shared", "separate"] = "none"
    """What estimates values for gae, vapo_gae, vtrace and turn_gae. shared: a head on the policy's last hidden state,
    whose loss also changes the policy's weights. separate: a second copy of the model with a head, which takes as much
    memory as the policy."""
    critic_lr: float = Field(1e-5, ge=0)
    """Learning rate of the head, and of the separate critic; follows `schedule` and `warmup_steps`."""
    critic_warmup_steps: int = Field(0, ge=0)
    """First training steps in which only the critic learns (under `shared` its head): the version grows, the policy
    does not change."""
    value_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the critic's loss: clip (none), scale (0.5), huber_delta (none)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL term towards the model at the start of the run; 0 keeps no reference model."""
    kl: str = "k3"
    """Estimator of that KL."""
    kl_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the estimator."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL term to the loss, or subtract it from the reward of each token before advantages are computed."""
    kl_unbiased: Literal["off", "proximal", "behaviour"] = "off"
    """In the loss, multiply the KL of a token by the ratio of the current policy to this one, with gradient: the KL
    under the current policy, from tokens that another one sampled (DeepSeek-V3.2)."""
    kl_limit: Literal["estimate", "weighted"] = "estimate"
    """What `kl_options.limit` bounds under `kl_unbiased`: the estimate, or the estimate times the ratio (slime)."""
    kl_controller: str = "fixed"
    """What sets that weight from step to step: fixed, adaptive (steers the KL to a target) or an import path."""
    kl_controller_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the controller. adaptive: target (nats a token), horizon (trajectories, 10000)."""
    reference_every: int = Field(0, ge=0)
    """Training steps between updates of the reference model to the current policy; 0: never."""
    teacher: TeacherConfig = TeacherConfig()
    ess_lr: Literal["off", "sqrt", "linear"] = "off"
    """Scales an update's learning rate by s = min(1, ESS over episode rows / `ess_lr_base`), or by its root (VCPO)."""
    ess_lr_base: float = Field(1.0, gt=0, le=1)
    """Effective sample size above which the learning rate is not scaled; the paper has 1 for maths, 0.55 for tools."""
    min_ess: float = Field(0.0, ge=0, le=1)
    """A batch whose effective sample size is below this share is skipped as guard, unless its gradient is exactly 0."""
    unsafe: bool = False
    """Allow stale data without a correction or with `proximal: behaviour`, and truncated sampling without kept ids
    (`actors.max_kept: 0`)."""
    batch_retries: int = Field(2, ge=1)
    """Learner deaths in a row with the same batch open, after which it is skipped as poison."""
    max_skipped: int = Field(3, ge=0)
    """Skipped batches in a row that are allowed; one more ends the run."""
    checkpoint_every: int = Field(20, ge=1)
    """Training steps between checkpoints."""
    checkpoint_s: float = Field(1800.0, gt=0)
    """Seconds that the next checkpoint, or the end of the run, waits for one that is still being written; past it the
    run fails."""
    keep_checkpoints: int = Field(2, ge=1)
    """Checkpoints kept for resuming."""
    gpu_memory: float = Field(1.0, gt=0, le=1)
    """Share of its GPU's memory that a learner's process may use: past it this process runs out of memory, rather than
    the engine on the same GPU (`weights.channel: cuda_ipc`)."""
    threads: int = Field(1, ge=1)
    """CPU threads of the learner; recorded, since results are bit-identical only with the same number."""
    seed: int = 0
    """Seed of the learner's random numbers."""

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _spelled(cls, given: Any) -> Any:
        return {True: "full", False: "none"}[given] if isinstance(given, bool) else given
