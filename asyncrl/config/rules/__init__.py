"""Rules that span several fields of the configuration: combinations that cannot work, or are probably not meant."""

from __future__ import annotations

from asyncrl.config.choosing import impossible_choices
from asyncrl.config.demonstrations import SFT, groups_per_step, of_demonstrations, supervised
from asyncrl.config.held_out import impossible_sets, pause
from asyncrl.config.rules.environments import of_environments
from asyncrl.config.rules.episodes import of_episodes
from asyncrl.config.rules.gpus import KINDS, of_gpus, of_quantization, quantization
from asyncrl.config.rules.ranks import of_ranks
from asyncrl.config.rules.replay import doubtful_replay, of_replay
from asyncrl.config.rules.sampling import of_sampling, without_slack
from asyncrl.config.rules.teacher import learns_from_teacher, of_teacher
from asyncrl.config.rules.tuning import of_tuning
from asyncrl.config.tree import Tree
from asyncrl.redaction import given_in_clear


def impossible(c: Tree) -> list[str]:
    """Combinations that cannot work: one sentence each, with field, value, expectation and remedy."""
    problems = []
    most, bound = c.buffer.most_staleness, "staleness_limit" if c.buffer.max_staleness == "auto" else "max_staleness"
    if c.weights.every > most + 1 and not supervised(c):
        problems.append(
            f"weights.every is {c.weights.every} but at most buffer.{bound} + 1 = {most + 1} "
            f"keeps data usable until the next publication: publish more often or raise buffer.{bound}."
        )
    batch = groups_per_step(c) * c.learner.group_size
    if c.buffer.capacity < batch:
        problems.append(
            f"buffer.capacity is {c.buffer.capacity} trajectories but one batch holds learner.groups_per_step * "
            f"learner.group_size = {batch}: raise buffer.capacity to at least {batch}."
        )
    if groups_per_step(c) % c.learner.minibatches:
        problems.append(
            f"learner.minibatches is {c.learner.minibatches}, which does not divide learner.groups_per_step = "
            f"{c.learner.groups_per_step}: choose a divisor."
        )
    if c.learner.backend_options and c.learner.backend in ("torch", "fsdp2"):
        problems.append(
            f"learner.backend_options is {c.learner.backend_options} but learner.backend {c.learner.backend} has none: "
            "remove them, or use learner.backend megatron."
        )
    problems += of_episodes(c) + of_environments(c, NEEDS_VALUES) + _layers(c) + impossible_sets(c)
    problems += impossible_choices(c)
    problems += _alone(c) + _greedy_baseline(c) + _critic(c) + _kl(c) + of_teacher(c)
    problems += of_ranks(c) + of_sampling(c) + of_replay(c) + of_demonstrations(c)
    problems += _ray(c) + of_tuning(c) + of_gpus(c) + of_quantization(c, SELF_CORRECTING)
    # Whether a user's loss corrects itself is known only after its import: the learner checks again.
    if ":" not in c.learner.loss and c.learner.loss not in SELF_CORRECTING and (problem := uncorrected(c)):
        problems.append(problem)
    return problems


def _layers(c: Tree) -> list[str]:
    lora, problems = c.learner.lora, []
    if lora.r and c.learner.backend == "megatron":
        problems.append(
            f"learner.lora.r is {lora.r} and learner.backend megatron, which trains all weights: use learner.backend "
            "torch or fsdp2, or learner.lora.r 0."
        )
    if c.learner.compile and c.learner.backend == "megatron":
        problems.append(
            "learner.compile is true and learner.backend megatron, which compiles nothing: use learner.backend torch "
            "or fsdp2, or learner.compile false."
        )
    if c.learner.compile and c.learner.activation_checkpointing == "selective":
        problems.append(
            "learner.compile is true and learner.activation_checkpointing selective, which looks at every operation of "
            "a layer: compiled ones hide theirs. Use learner.activation_checkpointing full, or learner.compile false."
        )
    if lora.lora_dropout:
        problems.append(
            f"learner.lora.lora_dropout is {lora.lora_dropout}: with dropout the policy that is trained is not the one "
            "that samples, and importance weights would correct for the noise. Set it to 0."
        )
    return problems


NEEDS_VALUES = frozenset(("gae", "vapo_gae", "vtrace", "turn_gae"))
"""Advantage estimators that declare a need for `values`: the config imports no torch, so it cannot ask them; a test
compares (tests/learner/objective/test_objective.py)."""


COMPARE = frozenset(("grpo", "dr_grpo", "rloo", "opo", "turn_grpo", "gigpo"))
"""Advantage estimators by which a group of one has advantage 0, unless their option `singleton` says otherwise."""


def _alone(c: Tree) -> list[str]:
    learner = c.learner
    options = learner.advantage_options  # with process rewards, the turns of one episode are compared too
    kept = learner.unsafe or options.get("singleton") == "reward" or options.get("variant") == "process"
    alone = supervised(c) or learns_from_teacher(c)
    if alone or learner.group_size > 1 or learner.advantage not in COMPARE or kept:
        return []
    return [
        f"learner.group_size is 1 and learner.advantage {learner.advantage} compares the episodes of a group, so that "
        "every advantage would be 0: raise it (8, say), choose reinforce_pp, or set "
        "learner.advantage_options.singleton reward."
    ]


def _greedy_baseline(c: Tree) -> list[str]:
    learner, problems = c.learner, []
    if learner.advantage == "remax" and not learner.greedy_baseline:
        problems.append(
            "learner.advantage is remax, which needs the reward of a greedy answer to every prompt: set "
            "learner.greedy_baseline true."
        )
    if not learner.greedy_baseline:
        return problems
    if learner.advantage != "remax" and ":" not in learner.advantage:
        problems.append(
            f"learner.greedy_baseline is true, and learner.advantage {learner.advantage} would take the greedy answer "
            "for a sampled one: choose remax, or learner.greedy_baseline false."
        )
    if learner.group_size < 2:
        problems.append(
            f"learner.group_size is {learner.group_size} and learner.greedy_baseline takes one of them: raise it to at "
            "least 2."
        )
    if learner.pf_ppo != "off":
        problems.append(
            f"learner.pf_ppo is {learner.pf_ppo} and would draw greedy answers too: use off, or "
            "learner.greedy_baseline false."
        )
    return problems


def _critic(c: Tree) -> list[str]:
    advantage, critic = c.learner.advantage, c.learner.critic
    problems = []
    if advantage in NEEDS_VALUES and critic == "none":
        problems.append(f"learner.advantage is {advantage}, which needs values: set learner.critic shared or separate.")
    chosen = {advantage, *(str(spec.get("name")) for spec in c.learner.advantage_by_env.values())}
    if critic != "none" and ":" not in "".join(chosen) and not chosen & NEEDS_VALUES:
        problems.append(
            f"learner.critic is {critic}, and learner.advantage {advantage} reads no values: choose one of "
            f"{', '.join(sorted(NEEDS_VALUES))}, or learner.critic none."
        )
    if critic == "none" and c.learner.critic_warmup_steps:
        problems.append(
            f"learner.critic_warmup_steps is {c.learner.critic_warmup_steps} and learner.critic none: there is nothing "
            "to warm up; set learner.critic, or 0."
        )
    if advantage == "gdpo" and (c.learner.shaping or c.learner.kl_in == "reward"):
        problems.append(
            "learner.advantage is gdpo, which reads the named rewards as they came: learner.shaping and learner.kl_in "
            "reward would not reach it. Leave them out, or choose another estimator."
        )
    return problems


def _kl(c: Tree) -> list[str]:
    learner = c.learner
    problems = []
    asked = {
        "learner.kl_in is reward": learner.kl_in == "reward",
        f"learner.kl_controller is {learner.kl_controller}": learner.kl_controller != "fixed",
        f"learner.reference_every is {learner.reference_every}": learner.reference_every > 0,
    }
    if learner.kl_coef == 0 and any(asked.values()):
        what = " and ".join(setting for setting, active in asked.items() if active)
        problems.append(f"{what}, while learner.kl_coef is 0: there is no KL term then; set it above 0.")
    if learner.kl_in == "reward" and learner.kl_unbiased != "off":
        problems.append(
            f"learner.kl_unbiased is {learner.kl_unbiased} with learner.kl_in reward: a reward has no gradient that "
            "could be unbiased; use learner.kl_in loss, or off."
        )
    if learner.kl_limit == "weighted" and learner.kl_unbiased == "off":
        problems.append(
            "learner.kl_limit is weighted while learner.kl_unbiased is off: the KL has no weight then; set "
            "kl_unbiased, or leave kl_limit at estimate."
        )
    return problems


def _ray(c: Tree) -> list[str]:
    if c.launch.backend != "ray":
        return []
    problems = []
    if not c.launch.host:
        problems.append(
            "launch.backend is ray and launch.host is empty, which keeps sockets on one host: set launch.host auto."
        )
    if c.weights.channel == "shm":
        problems.append(
            "launch.backend is ray and weights.channel shm, which is the memory of one host: set weights.channel zmq."
        )
    for field, named in (("ray.cpus", c.ray.cpus), ("ray.resources", c.ray.resources)):
        for role in named:
            if role.partition("-")[0] not in KINDS:
                problems.append(f"{field} names {role!r}: expected {', '.join(KINDS)}, or one such as actor-0.")
    return problems


SELF_CORRECTING = frozenset((SFT, "reinforce", "topr", "rollout_is", "dppo_tv", "dppo_kl"))
"""Losses that declare `correction="itself"`: their ratio is against the policy that sampled the token, whatever
`learner.proximal` and `learner.corrections` are. A list for the same reason, compared by the same test."""


def uncorrected(c: Tree) -> str | None:
    """Why a loss that does not correct itself must not be trained on stale data; None if something else corrects."""
    if c.buffer.most_staleness == 0 or c.learner.unsafe:
        return None
    if c.learner.proximal == "behaviour":
        return (
            f"learner.proximal is behaviour while buffer.max_staleness is {c.buffer.max_staleness}: then every "
            "correction is 1, and the trust region is around a policy of the past. Use recompute and a correction, "
            f"or a loss that corrects itself ({', '.join(sorted(SELF_CORRECTING - {SFT}))}); learner.unsafe: true "
            "allows it."
        )
    # The advantages of V-trace contain the importance weight.
    if c.learner.advantage != "vtrace" and not any(x.get("name", "none") != "none" for x in c.learner.corrections):
        return (
            f"learner.corrections is empty while buffer.max_staleness is {c.buffer.max_staleness}: stale data needs an "
            "importance correction, for instance [{name: tis}], or a loss that corrects itself "
            f"({', '.join(sorted(SELF_CORRECTING - {SFT}))}); learner.unsafe: true trains without."
        )
    return None


def doubtful_staleness_lr(c: Tree) -> list[str]:
    """The automatic bound cannot keep `buffer.staleness_lr` where its smallest value is too large for that."""
    least = max(c.weights.every - 1, int(c.buffer.replay > 0))
    is_used = c.buffer.max_staleness == "auto" and c.buffer.staleness_lr > 0 and not supervised(c)
    if not is_used or c.learner.lr * least <= c.buffer.staleness_lr:
        return []
    return [
        f"buffer.staleness_lr is {c.buffer.staleness_lr:g}, but learner.lr {c.learner.lr:g} times the smallest bound "
        f"{least} (weights.every - 1, at least 1 with buffer.replay) is {c.learner.lr * least:g}: the bound is never "
        "lowered below that. Lower learner.lr or weights.every, or raise buffer.staleness_lr."
    ]


def warnings(c: Tree) -> list[str]:
    """Combinations that work but are probably not meant."""
    problems = [
        f"{field} holds a secret, which stays in config.yaml of the run folder, for its owner only, and nowhere else: "
        "write ${NAME} instead, and the process that needs it reads the environment variable NAME."
        for field, _ in given_in_clear(c.model_dump(mode="json"))
    ]
    if not supervised(c):
        problems += _doubtful_generation(c)
    if how := quantization(c):
        problems.append(
            f"actors.engine_options.args.quantization is {how}: the policy that samples differs from the one that is "
            "trained even without staleness. Watch the mismatch KL and the effective sample size; the corrections "
            "(learner.corrections) must stay on."
        )
    if c.learner.advantage == "vtrace" and any(x.get("name") != "none" for x in c.learner.corrections):
        problems.append(
            "learner.advantage is vtrace, whose advantages contain the importance weight, and learner.corrections "
            "multiplies by it again: leave learner.corrections empty."
        )
    if c.learner.proximal == "approximate" and c.learner.minibatches == 1:
        problems.append(
            "learner.proximal is approximate with learner.minibatches 1: the exact logprobs cost nothing then, and "
            "are used."
        )
    return problems + doubtful_replay(c) + doubtful_staleness_lr(c)


def _doubtful_generation(c: Tree) -> list[str]:
    """What of a run with groups is probably not meant where tickets are issued."""
    problems = [problem for problem in (pause(c), without_slack(c)) if problem]
    if c.actors.count == 0:
        problems.append(
            "actors.count is 0: nothing is generated until an actor joins (asyncrl actors add), or this is 1 or more."
        )
    full_overlap = 2 * c.weights.every - 1
    if 0 < (most := c.buffer.most_staleness) < full_overlap:
        bound = "staleness_limit" if c.buffer.max_staleness == "auto" else "max_staleness"
        problems.append(
            f"buffer.{bound} {most} is below 2 * weights.every - 1 = {full_overlap}: "
            "generation and training overlap only in part."
        )
    return problems
