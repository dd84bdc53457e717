"""The sections of the configuration, every field documented where it is declared.

A field's docstring is its `--help` text. A constraint on one field stands on the field; constraints that span fields
stand in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt


class Section(BaseModel):
    """The base of every section: unknown fields are refused, values are frozen, docstrings describe the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


class ModelConfig(Section):
    path: str = "quickstart"
    """A Hugging Face folder or hub name; `quickstart` is the tiny model that comes with asyncrl."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in actors and learner. Master weights are float32 always."""


class DataConfig(Section):
    source: str = "lookup"
    """Where tasks come from: a name (`asyncrl envs` lists them) or `package.module:Name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the source."""
    seed: int = 0
    """Seed of the order in which tasks are drawn."""
    curriculum: str = "in_order"
    """Which task is drawn next, from what was measured: `in_order` (every task once per epoch, whatever is measured),
    `by_success`, `levels` (docs/data.md) or `package.module:Name`."""
    curriculum_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the curriculum."""
    on_step_end: str = ""
    """Import path of a function that adds tasks after a training step, from what its groups showed (docs/data.md)."""
    on_step_end_options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


class EnvConfig(Section):
    name: str = "lookup"
    """What an episode is played with: an environment, by name or `package.module:Name`, or an agent, the import path of
    a function of task and client (docs/agents.md). A bare `env: X` in the file means this field."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: int = Field(8, ge=1)
    """Assistant turns in one episode, at most. `max_turns` in the options of an environment with tools can only lower
    it."""
    max_tokens: int = Field(256, ge=2)
    """Tokens in one row of an episode (prompt, tool outputs and answers together), at most. The default is what the
    quickstart's model reads."""
    group_score: str = ""
    """A score that sees all episodes of a group at once and compares them: `listwise_judge` or `package.module:name`
    (docs/rewards.md). All episodes of a group are then played by one actor."""
    group_score_options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""
    group_score_weight: float = 1.0
    """What it is multiplied by before it is added to the reward that the environment gave."""
    call_s: float = Field(30.0, gt=0)
    """Seconds that one call of the environment (reset, step, close) may take."""
    workers: Literal["async", "threads", "processes"] = "async"
    """Where environments run: `async`, on the actor's event loop, for those that never block it; `threads`, for those
    that wait in plain functions; `processes`, for those that compute, or may crash."""
    worker_count: int = Field(4, ge=1)
    """Threads or processes of one actor; each plays many episodes, and one call at a time if calls block."""
    retries: int = Field(2, ge=0)
    """How often a trajectory whose environment failed is tried again before its group is dropped: env_error."""
    max_failures: float = Field(0.5, ge=0, le=1)
    """Past this share of the last `failure_window` attempts that failed in their environment, the run says so: a tool
    or service is probably away."""
    failure_window: int = Field(100, ge=1)
    """Attempts at episodes that `max_failures` looks back on."""
    on_failures: Literal["warn", "stop"] = "warn"
    """Past `max_failures`: say it and go on, dropping what fails, or end the run (exit code 1); it can be resumed."""


class ActorsConfig(Section):
    count: int = Field(1, ge=0)
    """Actor processes."""
    engine: str = "hf"
    """What generates: `hf` (embedded transformers), `vllm`, the servers `vllm_server` and `sglang` (docs/engines.md)
    or `package.module:Name`."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the engine."""
    slots: Annotated[int, Field(ge=1)] | Literal["auto"] = 64
    """Episodes that one actor plays at the same time; auto: as many as its engine has room for (`max_slots`)."""
    max_slots: int = Field(256, ge=1)
    """Under `slots: auto`, at most so many; the engine is set up for them."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the learner divides its logits by it too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; below 1 only with `learner.unsafe`, because engines disagree on renormalising."""
    top_k: int = Field(0, ge=0)
    """Top-k sampling, 0 is off; above 0 only with `learner.unsafe`."""
    max_new_tokens: int = Field(128, ge=1)
    """Tokens that one assistant turn may have."""
    tool_calls: str = "hermes"
    """How the model writes tool calls: `hermes` (Hermes, Qwen 2.5 and 3), `llama` (3.1 and later, JSON), `pythonic`
    (Llama 3.2 and 4), `mistral` or `package.module:Name`."""
    renderer: str = "template"
    """Messages to token ids and back: `template`, the tokenizer's chat template, or `package.module:Name` of what makes
    a renderer from the tokenizer, one of the package `renderers` or your own (docs/agents.md)."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end an assistant turn; empty: the tokenizer's eos token."""
    seed: int = 0
    """Seed of the sampling; each attempt at a ticket draws from a stream of its own."""
    threads: int = Field(1, ge=1)
    """CPU threads of the embedded engine."""
    episode_idle_s: float = Field(120.0, gt=0)
    """An episode that makes no progress for so long loses its lease: it is given to another slot or actor."""
    episode_s: float = Field(1800.0, gt=0)
    """Hard limit of one episode."""
    drain_s: float = Field(5.0, ge=0)
    """How long an actor that is told to stop may go on finishing its episodes, or take to hand them back."""
    resume_episodes: bool = False
    """An episode that its actor could not finish when told to stop, and whose environment was not stepped yet, is
    handed back with what was sampled, and continued by the next actor (docs/engines.md). Otherwise it starts anew."""

    @property
    def most_slots(self) -> int:
        """What an engine must have room for."""
        return self.max_slots if self.slots == "auto" else self.slots


class BufferConfig(Section):
    dir: str | None = None
    """Local disk folder of the live ledger, `$NAME` standing for an environment variable of the buffer's host; default:
    `buffer/` in the run folder. Network filesystems are refused."""
    capacity: int = Field(1024, ge=1)
    """Trajectories that may be in flight or waiting at once."""
    max_staleness: int = Field(2, ge=0)
    """Hard bound: no token that carries loss is more than so many training steps old. 0 is the synchronous trainer."""
    over_age: Literal["drop", "wait", "mask"] = "drop"
    """What happens to a group past the bound: dropped, waited for in time, or its old tokens masked."""
    requeue: bool = True
    """A prompt whose group was dropped as stale is put back to be drawn again."""
    wait_s: float = Field(60.0, gt=0)
    """Under `over_age: wait`, how long the learner waits for a group before it is dropped: wait_deadline."""
    mask_min_kept: float = Field(0.5, ge=0, le=1)
    """Under `over_age: mask`, the share of policy tokens that must stay unmasked, else the group is dropped: stale."""
    sampler: str = "fifo"
    """Which complete groups make the next batch: fifo, freshest, uniform, priority or `package.module:name`."""
    max_uses: int = Field(1, ge=1)
    """Batches in which one group may appear."""
    filters: tuple[str, ...] = ()
    """Groups never trained on: zero_variance, too_long or `package.module:name`."""
    filter_max_ratio: float = Field(4.0, ge=0)
    """While one batch is filled, filters drop at most so many times `learner.groups_per_step` groups."""
    on_starved: Literal["train", "end"] = "train"
    """Past `filter_max_ratio`: train on the groups with advantage 0, or end the run as solved."""
    lease_s: float = Field(30.0, gt=0)
    """A ticket whose lease is not renewed for so long is given to somebody else."""
    keep: Literal["needed", "all"] = "needed"
    """Which payloads stay on disk: those that a resume still needs, or all."""
    fsync: Literal["commit", "interval", "off"] = "interval"
    """What a power cut may undo: nothing (`commit`), the last `fsync_interval_s` and as long as a flush takes
    (`interval`), what the kernel had not written (`off`). A killed process never undoes anything acknowledged."""
    fsync_interval_s: float = Field(1.0, gt=0)
    """Seconds between flushes to the disk under `fsync: interval`."""
    commit_ms: float = Field(5.0, ge=0)
    """Puts that arrive within so many milliseconds share one commit."""
    max_disk_gb: float = Field(20.0, gt=0)
    """Bound on the payloads kept; near it checkpoints are asked for, at it no new group is issued."""


class WeightsConfig(Section):
    every: int = Field(1, ge=1)
    """Cadence: weights are published each time the policy version has grown by so many training steps."""
    kv: Literal["recompute", "reuse"] = "recompute"
    """Running sequences after an update: prefilled again under the new weights, or continued on the old KV cache."""
    drain: bool = False
    """Let running requests finish before an update instead of updating in flight."""
    channel: str = "shm"
    """How weights travel: `shm`, a file in shared memory of one host; `zmq`, also to other hosts: each fetches a
    version once, what changed of it where that is less, and its actors share it; `cuda_ipc`, to engines on the
    learner's own GPU; `nccl`, from GPU to GPU (docs/weights.md); or `package.module:Name`."""
    full_every: int = Field(100, ge=0)
    """Of `zmq`: every so many publications hosts fetch the whole file, whatever changed. 0: only when they must."""
    fanout: int = Field(8, ge=0)
    """Of `zmq`: so many hosts fetch from the learner's host, so many from each of those, and so on. 0: all of them from
    the learner's host."""


class EvalConfig(Section):
    tasks: int = Field(200, ge=0)
    """Held-out tasks played before the first and after the last training step; 0: no evaluation."""
    samples: int = Field(1, ge=1)
    """Episodes per held-out task at the training temperature."""
    greedy: bool = True
    """Play each held-out task once more, greedily."""
    success: str = "success"
    """The reward that counts as success, by its name in the environment; the whole one where none has the name. 1 is a
    success."""


class TrackingConfig(Section):
    sinks: tuple[str, ...] = ("jsonl",)
    """Where metrics go, besides the screen: jsonl, wandb, trackio or `package.module:Name`."""
    project: str = "asyncrl"
    """Project name at wandb or trackio."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """offline: the run is kept in the run folder and can be sent later with `wandb sync`."""
    system_s: float = Field(2.0, gt=0)
    """Seconds between samples of CPU and memory per process."""


class RayConfig(Section):
    address: str = ""
    """Of a running cluster, `host:port` or `auto`. Empty: the one that RAY_ADDRESS names, as within `ray job submit`,
    else one on this machine, for this run alone."""
    cpus: dict[str, float] = Field(default_factory=dict)
    """CPUs that one process of a role (`actor-0`) or kind of role (`actor`, `learner`, `buffer`, `weights`) sets aside
    on its node; 1 where not named."""
    resources: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Resources that nodes were given by name, of a role or kind: `{buffer: {fast_disk: 1}}` keeps it on such nodes."""
    environment: tuple[str, ...] = ("ASYNCRL_LOG", "HF_HOME", "HF_HUB_OFFLINE", "PYTHONPATH")
    """Variables that roles on other nodes get from the launcher's environment. No secrets: the cluster sees them."""


class LaunchConfig(Section):
    name: str | None = None
    """Name of the run; default: the config's name and the time."""
    runs_dir: str = "runs"
    """Folder of the run folders."""
    backend: Literal["local", "ray"] = "local"
    """Where processes are started: `local`, as subprocesses of this machine, or `ray`, on the nodes of a Ray cluster
    (docs/cluster.md)."""
    gpus: dict[str, float] = Field(default_factory=dict)
    """Under `ray`, GPUs that one process of a role (`actor-0`) or kind of role sets aside and sees: a number, or a
    share of one. Not named: none, for an actor its engine's `tensor_parallel` when that is above 1."""
    host: str = ""
    """Empty: sockets are files of this host that only its owner can reach (ipc). Else the address of this host on which
    roles listen, encrypted and for this run's keys only (tcp with CURVE); `auto`: the one that others reach it by."""
    cpus: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """CPU cores of a role (`actor-0`) or kind of role (`actor`, `learner`, `buffer`); one not named uses all."""
    restarts: int = Field(3, ge=0)
    """Restarts per process within `restart_window_s`; past it the run ends."""
    restart_window_s: float = Field(600.0, gt=0)
    """Window of the restart budget."""
    start_s: float = Field(180.0, gt=0)
    """Seconds in which a process must report that it is ready."""
    stop_s: float = Field(20.0, gt=0)
    """Seconds that a process has to stop in order before it is killed."""
    stall_s: float = Field(120.0, gt=0)
    """Past so many seconds without progress the run says who waits for whom, and writes every process's stacks."""
    on_stall: Literal["warn", "restart", "abort"] = "warn"
    """Then: go on, start the roles anew that the others wait for (within their budget), or end the run."""
    seed: int | None = None
    """Sets `data.seed`, `actors.seed` and `learner.seed` together: those that the file does not give; as a flag, those
    that no flag gives."""
