"""How far A-3PO's approximate proximal logprobs are from the true ones, on samples of a known lag.

One process, a small random transformer, a ring of old weights: every sample is exactly `lag` versions old. Four
updates a step, decoupled PPO with TIS. At each update, in nats a token: the mean and 99th percentile of
|approximate - proximal|, and the mean |behaviour - proximal| for scale. Each lag is run with the true proximal logprobs
in the loss, and with the approximate ones.

    python scripts/bench/approximate_proximal.py --steps 120
"""

from __future__ import annotations

import argparse
import json
from collections import deque

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.learner.advantages import ESTIMATORS, EstimatorInputs
from asyncrl.learner.corrections import CORRECTIONS, CorrectionInputs
from asyncrl.learner.losses import AGGREGATIONS, LOSSES, LossInputs
from asyncrl.learner.losses.aggregation import AggregationInputs
from asyncrl.learner.step.proximal import approximate_proximal

VOCABULARY, RESPONSE, PROMPTS, GROUP, UPDATES = 32, 12, 8, 8, 4


def model_of(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=16, **sizes))


def logprobs(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    """[rows, RESPONSE] of the sampled tokens."""
    scores = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None])[..., 0]


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, generator: torch.Generator) -> Tensor:
    ids = torch.randint(VOCABULARY, (PROMPTS, 1), generator=generator).repeat_interleave(GROUP, 0)
    for _ in range(RESPONSE):
        chances = model(input_ids=ids, use_cache=False).logits[:, -1].float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    return ids


def reward(ids: Tensor) -> Tensor:
    """The share of tokens that are one more than the token before."""
    return (ids[:, 1:] == (ids[:, :-1] + 1) % VOCABULARY).float().mean(1)


def run(lag: int, steps: int, seed: int, use_approximate: bool) -> dict[str, float]:
    model, behaviour_model = model_of(seed), model_of(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    ring: deque[dict[str, Tensor]] = deque(maxlen=lag + 1)
    errors: list[Tensor] = []
    gaps: list[Tensor] = []
    rewards: list[float] = []
    rows = PROMPTS * GROUP
    for version in range(steps):
        ring.append({k: v.clone() for k, v in model.state_dict().items()})
        behaviour_model.load_state_dict(ring[0])
        ids = sample(behaviour_model, generator)
        with torch.no_grad():
            behaviour, proximal = logprobs(behaviour_model, ids), logprobs(model, ids)
        rewards.append(float(reward(ids).mean()))
        per_token = torch.zeros_like(behaviour)
        per_token[:, -1] = reward(ids)
        everything = torch.ones(rows * RESPONSE, dtype=torch.bool)
        lengths = torch.full((rows,), RESPONSE)
        groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
        episodes = EstimatorInputs(
            rewards=per_token.flatten(),
            mask=everything,
            lengths=lengths,
            groups=groups,
            episodes=torch.arange(rows),
            behaviour=behaviour.flatten(),
        )
        advantages = ESTIMATORS["grpo"](episodes).advantages.view_as(behaviour)
        versions = torch.full_like(ids[:, 1:], max(version - lag, 0))
        for part in torch.randperm(rows, generator=generator).chunk(UPDATES):
            current = logprobs(model, ids[part])
            approximate = approximate_proximal(behaviour[part], current, versions[part], version)
            errors.append((approximate - proximal[part]).abs().flatten())
            gaps.append((behaviour[part] - proximal[part]).abs().flatten())
            anchor = (approximate if use_approximate else proximal[part]).flatten()
            mask, cut = everything[: anchor.numel()], lengths[: len(part)]
            tokens = {
                "proximal": anchor,
                "behaviour": behaviour[part].flatten(),
                "advantages": advantages[part].flatten(),
                "mask": mask,
                "lengths": cut,
            }
            weights = CORRECTIONS["tis"](CorrectionInputs(current=current.detach().flatten(), **tokens)).weights
            inputs = LossInputs(
                current=current.flatten(),
                weights=weights,
                groups=groups[part],
                episodes=part,
                rewards=per_token[part].flatten(),
                generator=generator,
                **tokens,
            )
            loss = LOSSES["decoupled_ppo"](inputs)
            optimizer.zero_grad()
            AGGREGATIONS["token_mean"](AggregationInputs(loss.per_token, mask, cut)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    error, gap = torch.cat(errors), torch.cat(gaps)
    return {
        "lag": lag,
        "trained_with_approximate": use_approximate,
        "seed": seed,
        "error_mean": float(error.mean()),
        "error_p99": float(error.kthvalue(int(0.99 * error.numel())).values),
        "behaviour_gap_mean": float(gap.mean()),
        "reward_last_20": sum(rewards[-20:]) / len(rewards[-20:]),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=120)
    arguments.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4, 16])
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = arguments.parse_args()
    for lag in chosen.lags:
        for use_approximate in (False, True):
            for seed in chosen.seeds:
                print(json.dumps(run(lag, chosen.steps, seed, use_approximate)), flush=True)


if __name__ == "__main__":
    main()
