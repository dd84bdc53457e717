"""The sections of the configuration, every field documented where it is declared.

A field's docstring is its `--help` text (meanings.py). A constraint on one field stands on the field; constraints that
span fields stand in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator

from asyncrl.trajectory.kept_ids import MAX_KEPT


class Section(BaseModel):
    """The base of every section: unknown fields are refused, values are frozen, docstrings describe the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelConfig(Section):
    path: str = "quickstart"
    """A Hugging Face folder or hub name; `quickstart` is the tiny model that comes with asyncrl."""
    made_with: str = ""
    """The command that makes the folder of `path`, which the error names when there is no such folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in actors and learner. Master weights are always float32."""


class DataConfig(Section):
    source: str = "lookup"
    """Where tasks come from: a name (`asyncrl envs` lists them) or `package.module:Name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the source."""
    seed: int = 0
    """Seed of the order in which tasks are drawn."""
    curriculum: str = "in_order"
    """Chooses the next task from measured success: `in_order` (every task once per epoch, whatever its success),
    `by_success`, `learnability`, `levels` (docs/how-to/data.md) or `package.module:Name`."""
    curriculum_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the curriculum."""
    on_step_end: str = ""
    """Import path of a function that adds tasks after a training step, made from its groups (docs/how-to/data.md)."""
    on_step_end_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function."""
    demonstrations: tuple[str, ...] = ()
    """Chats whose assistant messages are trained on (docs/how-to/sft.md): files of JSON lines, or parquet, a folder of
    save_to_disk, a hub name."""
    demonstrations_split: str = "train"
    """Split of a hub dataset or a saved folder of demonstrations."""

    @field_validator("demonstrations", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) and given else given or ()


class EnvConfig(Section):
    name: str = "lookup"
    """The environment of an episode, by name or `package.module:Name`; or an agent, as the import path of a function of
    task and client (docs/how-to/agents.md). A bare `env: X` in the file sets this field."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: int = Field(8, ge=1)
    """Maximum of assistant turns in one episode. `max_turns` in the options of an environment with tools can only lower
    it."""
    max_tokens: int = Field(256, ge=2)
    """Maximum of tokens in one row of an episode (prompt, tool outputs and answers). The default is the context length
    of the quickstart's model."""
    compact: float = Field(0.0, ge=0, lt=1)
    """Share of `max_tokens` from which a row ends with a summary: the policy is asked for one, and a new row begins
    from it (docs/how-to/environments.md). 0: never; an episode then ends at `max_tokens`."""
    compact_request: str = ""
    """The user message that asks for the summary; empty: a ready-made one."""
    group_score: str = ""
    """A score that compares all episodes of a group: `listwise_judge` or `package.module:name`
    (docs/how-to/rewards.md). All episodes of a group are then played by one actor."""
    group_score_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that score."""
    group_score_weight: float = 1.0
    """Weight of that score; the product is added to the reward of the environment."""
    call_s: float = Field(30.0, gt=0)
    """Seconds allowed for one call of the environment (reset, step, close)."""
    max_reward: float = Field(1e6, gt=0, le=1e15)
    """Largest size of a reward, of its parts and of a group score. A larger one, or one that is not finite, is a
    failure of the environment (env_error)."""
    workers: Literal["async", "threads", "processes"] = "async"
    """Where environments run: `async`, on the actor's event loop, for environments that never block it; `threads`, for
    those that wait in plain functions; `processes`, for those that compute, or may crash."""
    worker_count: int = Field(4, ge=1)
    """Threads or processes of one actor; each plays many episodes, and one call at a time if calls block."""
    retries: int = Field(2, ge=0)
    """Retries of a trajectory whose environment failed, before its group is dropped as env_error."""
    max_failures: float = Field(0.5, ge=0, le=1)
    """If more than this share of the last `failure_window` attempts failed in their environment, the run reports it: a
    tool or service is probably unavailable."""
    failure_window: int = Field(100, ge=1)
    """Number of attempts that `max_failures` looks back on."""
    on_failures: Literal["stop_if_all", "stop", "warn"] = "stop_if_all"
    """What follows when environments fail. `stop_if_all`: the run ends (exit code 1) when the first 20 attempts all
    failed in the same way, or the first 100 in whatever ways, before any succeeded; connection errors and timeouts must
    last for 60 s. `stop`: it also ends past `max_failures`. `warn`: it never ends for this. A run that ended can be
    resumed."""


class ActorsConfig(Section):
    count: int = Field(1, ge=0)
    """Actor processes."""
    eval: int = Field(0, ge=0)
    """How many of these, the first ones, play nothing but evaluations during the run (`eval.every`); 0: some are chosen
    for each (`eval.share`). Before the first and after the last step all actors play."""
    engine: str = "hf"
    """Inference engine: `hf` (embedded transformers), `vllm`, the servers `vllm_server` and `sglang`
    (docs/how-to/engines.md) or `package.module:Name`."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the engine."""
    slots: Annotated[int, Field(ge=1)] | Literal["auto"] = 64
    """Concurrent episodes of one actor; auto: as many as its engine has room for, at most `max_slots`, and under
    `launch.tuning: auto` at most the number that is in force."""
    max_slots: int = Field(256, ge=1)
    """Maximum under `slots: auto`; the engine is set up for it."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the learner divides its logits by it too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: only the most probable tokens that together reach this probability. Below 1 the kept ids travel
    with each token, which not every engine gives (docs/how-to/engines.md)."""
    top_k: int = Field(0, ge=0)
    """Top-k sampling: only so many of the most probable tokens; kept ids as under `top_p`. 0 is off."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Min-p sampling: only tokens of at least this share of the largest probability; kept ids as under `top_p`. 0 is
    off."""
    max_kept: int = Field(256, ge=0, le=MAX_KEPT)
    """Most kept ids that are recorded of one token under `top_p`, `top_k` or `min_p`; a token for which more are left
    carries no loss (`correction/beyond_max_kept`). 0: none are recorded, the learner's logprobs are over the whole
    vocabulary, and `learner.unsafe` is required."""
    max_new_tokens: int = Field(128, ge=1)
    """Maximum of tokens in one assistant turn."""
    tool_calls: str = "hermes"
    """How the model writes tool calls: `hermes` (Hermes, Qwen 2.5 and 3), `llama` (3.1 and later, JSON), `pythonic`
    (Llama 3.2 and 4), `mistral` or `package.module:Name`."""
    constraints: Literal["refuse", "ignore"] = "refuse"
    """What an agent's request gets whose fields constrain sampling (`response_format`, `.parse(Model)`, `tool_choice:
    required` or a named function): an error, or a reply that is sampled freely, as if the field were not there."""
    renderer: str = "template"
    """Converts messages to token ids and back: `template`, the tokenizer's chat template, or `package.module:Name` of a
    callable that makes a renderer from the tokenizer: one of the package `renderers`, or your own
    (docs/how-to/agents.md)."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end an assistant turn; empty: the tokenizer's eos token."""
    seed: int = 0
    """Sampling seed; each attempt at a ticket has its own random stream."""
    threads: int = Field(1, ge=1)
    """CPU threads of the embedded engine."""
    episode_idle_s: float = Field(120.0, gt=0)
    """Seconds without progress after which an episode loses its lease; its ticket is issued again."""
    episode_s: float = Field(1800.0, gt=0)
    """Limit of one episode, in seconds. Where `episode_max_s` is larger, each finished turn gives it as long again."""
    episode_max_s: float = Field(0.0, ge=0)
    """Hard limit of an episode that keeps finishing turns, in seconds; 0: `episode_s`."""
    drain_s: float = Field(5.0, ge=0)
    """Seconds that an actor has, when it is stopped, to finish its episodes or hand them back."""

    @property
    def truncated(self) -> bool:
        """Whether fewer tokens than the vocabulary holds can be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def most_episode_s(self) -> float:
        """The seconds that an episode may last at most."""
        return max(self.episode_s, self.episode_max_s)

    @property
    def most_slots(self) -> int:
        """The number of episodes that an engine must have room for."""
        return self.max_slots if self.slots == "auto" else self.slots


class BufferConfig(Section):
    dir: str | None = None
    """Folder of the live ledger on a local disk; `$NAME` is an environment variable of the buffer's host. Default:
    `buffer/` in the run folder. Network filesystems are refused."""
    capacity: int = Field(1024, ge=1)
    """Trajectories that may be in flight or waiting at once."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["auto"] = 2
    """Hard bound, in training steps, on the age of every token that carries loss. 0 is the synchronous trainer. auto:
    chosen while the run goes, up to `staleness_limit` (docs/how-to/planning.md)."""
    staleness_limit: int = Field(8, ge=0)
    """Under `max_staleness: auto`, the largest bound."""
    staleness_lr: float = Field(0.0, ge=0)
    """Under `max_staleness: auto`, the most that the learning rate times the bound may be: the bound is lowered, never
    the rate, and not below `weights.every - 1` (1 with `replay`), where the product may be larger. 0: off."""
    over_age: Literal["drop", "wait", "mask"] = "drop"
    """drop: a group past the bound is dropped. mask: only its old tokens lose their loss. wait: the learner waits for a
    group before it is past the bound."""
    requeue: bool = True
    """Put the prompt of a group that was dropped as stale back, to be drawn again."""
    wait_s: float = Field(60.0, gt=0)
    """Under `over_age: wait`, seconds that the learner waits for a group before it is dropped as wait_deadline."""
    mask_min_kept: float = Field(0.5, ge=0, le=1)
    """Under `over_age: mask`, the share of policy tokens that must stay unmasked, or the group is dropped as stale."""
    sampler: str = "fifo"
    """Chooses the complete groups of the next batch: fifo, freshest, uniform, priority or `package.module:name`."""
    max_uses: int = Field(1, ge=1)
    """Maximum of batches in which one group may appear."""
    replay: float = Field(0.0, ge=0, le=100)
    """Up to this multiple of `learner.groups_per_step` of groups that were used before are added to each batch, beside
    its new ones. Needs `max_uses` of at least 2 and `max_staleness` of at least 1. 0: off."""
    replay_priority: str = "spread"
    """Which used groups are drawn more often: spread (standard deviation of the rewards), learnability (p (1 - p) of
    the share p of rewards of 1 or more), uniform, or `package.module:name`, a function of the group."""
    replay_half_life: float | None = Field(2.0, gt=0)
    """Versions of age that halve a priority (freshness-aware); null: age does not count."""
    replay_exponent: float = Field(0.6, ge=0, le=10)
    """Replayed groups are drawn in proportion to their priority to this power."""
    replay_beta: float = Field(0.4, ge=0, le=1)
    """How far the loss of a replayed group is divided by its chance p of being drawn: the factor is (N p)^-beta of N
    candidates, over the largest of the batch. 0: every group counts alike; 1: fully."""
    filters: tuple[str, ...] = ()
    """Filters that drop complete groups: zero_variance, too_long or `package.module:name`."""
    filter_max_ratio: float = Field(4.0, ge=0)
    """While one batch is filled, filters drop at most this multiple of `learner.groups_per_step` groups."""
    on_starved: Literal["train", "end"] = "train"
    """Past `filter_max_ratio`: train on the groups with advantage 0, or end the run as solved."""
    lease_s: float = Field(30.0, gt=0)
    """Seconds after which a ticket whose lease was not renewed is issued again."""
    keep: Literal["needed", "all"] = "needed"
    """Payloads that stay on disk: those that a resume still needs, or all."""
    fsync: Literal["commit", "interval", "off"] = "interval"
    """What a power cut may undo: nothing (`commit`), the last `fsync_interval_s` and the time of a flush (`interval`),
    or whatever the kernel had not written (`off`). A killed process never undoes anything acknowledged."""
    fsync_interval_s: float = Field(1.0, gt=0)
    """Seconds between flushes to the disk under `fsync: interval`."""
    commit_ms: float = Field(5.0, ge=0)
    """Milliseconds within which puts share one commit."""
    max_disk_gb: float = Field(20.0, gt=0)
    """Bound on the size of payloads; from 75% on no turns are recorded, from 80% on the learner is asked for
    checkpoints, at 100% no new group is issued."""
    turns: Literal["off", "on", "auto"] = "off"
    """on: the turns of an episode are recorded as they are played, so that another actor continues at the turn where
    one has stopped (docs/how-to/long-episodes.md). off: an interrupted episode starts over. auto: on for an environment
    whose episodes take long (`turns_auto_s`)."""
    turns_auto_s: float = Field(60.0, gt=0)
    """Under `turns: auto`: seconds that more than a tenth of an environment's last 100 episodes (at least 10) must
    exceed."""
    turn_max_kb: int = Field(1024, ge=4, le=65536)
    """KiB of what an environment gives at one turn, its snapshot included. An episode with more fails as env_error. The
    policy's messages are bounded by their tokens."""

    @property
    def most_staleness(self) -> int:
        """The largest bound on staleness that the run may have."""
        return self.staleness_limit if self.max_staleness == "auto" else self.max_staleness


class WeightsConfig(Section):
    every: int = Field(1, ge=1)
    """Cadence: training steps between two publications of weights. A step at which an evaluation is due is published
    too."""
    kv: Literal["recompute", "reuse"] = "recompute"
    """After an update, running sequences are prefilled again under the new weights, or continue on the old KV cache."""
    drain: bool = False
    """Let running requests finish before an update instead of updating in flight."""
    channel: str = "shm"
    """How weights reach the actors: `shm`, through shared memory of one host; `zmq`, also to other hosts, each of which
    fetches a version once (only the changes, if they are smaller) and shares it among its actors; `cuda_ipc`, to
    engines on the learner's own GPU; `nccl`, from GPU to GPU (docs/explanation/weights.md); or
    `package.module:Name`."""
    full_every: int = Field(100, ge=0)
    """For `zmq`: publications after which hosts fetch the whole file instead of changes. 0: only when they must."""
    fanout: int = Field(8, ge=0)
    """For `zmq`: number of hosts that fetch from the learner's host, and again from each of those, and so on. 0: all
    fetch from the learner's host."""


class EvalSetConfig(Section):
    """One held-out set of `eval.sets`. What it leaves out is as in `eval`, and as in training."""

    env: str = ""
    """Its environment; empty: `env.name` with `env.options`."""
    env_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `env`."""
    source: str = ""
    """Where its tasks come from, of which those held out are played; empty: `data.source` with `data.options`."""
    source_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `source`."""
    tasks: int | None = Field(None, ge=1)
    """Held-out tasks; default: `eval.tasks`."""
    samples: int | None = Field(None, ge=1)
    """Sampled episodes of each task; default: `eval.samples`."""
    greedy: bool | None = None
    """Play each task once more, greedily; default: `eval.greedy`."""
    temperature: float | None = Field(None, gt=0)
    """Temperature of the sampled episodes; default: `actors.temperature`."""
    pass_at: list[int] = Field(default_factory=list)
    """The k of pass@k, at most `samples`; empty: the powers of two."""
    success: str | None = None
    """Name of the reward that counts as success; default: `eval.success`."""


class EvalConfig(Section):
    tasks: int = Field(200, ge=0)
    """Held-out tasks played before the first and after the last training step, and every `eval.every` steps; 0: no
    evaluation."""
    samples: int = Field(1, ge=1)
    """Episodes of each held-out task at the training temperature."""
    greedy: bool = True
    """Play each held-out task once more, greedily."""
    success: str = "success"
    """Name of the reward, among those of the environment, that counts as success; the total reward if none has this
    name. 1 is a success."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Held-out sets by name, each a mapping of `env`, `env_options`, `source`, `source_options`, `tasks`, `samples`,
    `greedy`, `temperature`, `pass_at`, `success` (docs/how-to/evaluation.md). The first is the one that the terminal
    shows. Empty: one set, `held_out`, of the fields above."""
    every: int = Field(0, ge=0)
    """Training steps from one evaluation during the run to the next; 0: only before the first and after the last."""
    stop_at: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    """The run ends when the success of one of these sets reaches its value: `{SET: value}`. The sampled success counts;
    `SET/greedy` names the greedy one."""
    patience: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """The run ends when so many evaluations of one of these sets have not exceeded its best success: `{SET:
    evaluations}`, or `SET/greedy`."""
    keep_best: str = ""
    """The set, or `SET/greedy`, by whose success the best weights are kept: each evaluation step writes an export in
    `RUN/exports`, and the best one stays. Empty: none is written."""
    final: str = ""
    """A set of `sets` that is played after the end only, with the best export of `keep_best`; empty: none."""
    share: float = Field(0.25, gt=0, le=1)
    """With no actor reserved (`actors.eval`), the share of the actors that may play an evaluation during the run, at
    least one; the others keep training."""
