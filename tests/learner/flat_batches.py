"""Flat batches of every shape the learner meets: ragged rows, holes, empty rows, groups of 1 to 8, zero variance."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asyncrl.learner.advantages.estimator import EstimatorInputs
from asyncrl.learner.corrections import CorrectionInputs
from asyncrl.learner.losses import LossInputs
from tests.learner.reference import Batch

PER_ROW = ("lengths", "groups", "episodes")


class Flat:
    """A batch as tensors and, in `rows`, as the reference's lists."""

    def __init__(
        self,
        seed: int,
        *,
        several_rows: bool = False,
        extreme: bool = False,
        empty: bool = False,
        tokens: bool = True,
    ) -> None:
        rng = random.Random(seed)
        lengths: list[int] = []
        groups: list[int] = []
        episodes: list[int] = []
        mask: list[bool] = []
        rewards: list[float] = []
        order: list[tuple[int, int]] = []
        for g, size in enumerate(rng.sample([1, 2, 3, 5, 8], 3)):
            for k in range(size):
                order += [(g * 7 + 3, g * 100 + k)] * (rng.randint(1, 3) if several_rows else 1)
        rng.shuffle(order)
        flat_group = rng.choice([g for g, _ in order])
        for g, e in order:
            n = rng.choice([1, 2, 4] if g == flat_group else [0, 1, 2, 4, 7, 11]) if tokens else 0
            row_mask = [not empty and rng.random() < 0.7 for _ in range(n)]
            row = [0.0] * n
            if any(row_mask):
                last = max(i for i, m in enumerate(row_mask) if m)
                row[last] = rng.choice([0.0, 1.0, 0.1, -0.5, rng.gauss(0, 1)])
            lengths.append(n)
            groups.append(g)
            episodes.append(e)
            mask += row_mask
            rewards += row
        size = len(mask)
        self.rows = Batch(lengths, groups, episodes, mask)
        if not several_rows:  # one group of equal rewards: 0.1, whose mean is not 0.1 in floating point
            for b, row in enumerate(self.rows.all_rows):
                for i in row:
                    if groups[b] == flat_group:
                        rewards[i] = 0.1 / len(row)
        spread = 25.0 if extreme else 0.6

        def logprobs(around: list[float] | None) -> list[float]:
            base = around or [-abs(rng.gauss(0, 2)) - 0.01 for _ in range(size)]
            if around is None:
                return base
            return [min(v + rng.choice([rng.gauss(0, 0.3), rng.uniform(-spread, spread)]), -1e-3) for v in base]

        self.floats = {"rewards": rewards, "proximal": logprobs(None)}
        self.floats["behaviour"] = logprobs(self.floats["proximal"])
        self.floats["current"] = logprobs(self.floats["proximal"])
        if extreme:
            for i in range(0, size, 5):
                self.floats["behaviour"][i] = self.floats["proximal"][i] - 25
                self.floats["current"][i] = self.floats["proximal"][i] - 25
        self.floats["advantages"] = [rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 1)]) for _ in range(size)]
        self.floats["values"] = [rng.gauss(0, 1) for _ in range(size)]
        self.floats["sum_pi_sq"] = [rng.random() for _ in range(size)]
        self.floats["weights"] = [rng.random() * 2 for _ in range(size)]
        self.lengths = torch.tensor(lengths)
        self.groups = torch.tensor(groups)
        self.episodes = torch.tensor(episodes)
        self.mask = torch.tensor(mask, dtype=torch.bool)
        self._add_turns(random.Random(1000 + seed))

    def _add_turns(self, rng: random.Random) -> None:
        """Turns of one token or more, some numbers left out; rewards at their ends; states that siblings meet too."""
        size = len(self.rows.mask)
        turn_of, states, self.floats["turn_rewards"] = [-1] * size, [-1] * size, [0.0] * size
        for tokens in self.rows.episode_tokens().values():
            number = rng.choice([0, 0, 1])
            state = rng.randrange(3)
            for place, i in enumerate(tokens):
                turn_of[i], states[i] = number, state
                if place + 1 == len(tokens) or rng.random() < 0.5:
                    self.floats["turn_rewards"][i] = rng.choice([0.0, 1.0, -0.5, rng.gauss(0, 1)])
                    number += rng.choice([1, 1, 2])
                    state = rng.randrange(-1, 5)
        self.turn_of, self.states = torch.tensor(turn_of, dtype=torch.long), torch.tensor(states, dtype=torch.long)

    def __getattr__(self, name: str) -> Tensor:
        """A token quantity as float64, with NaN where the policy sampled nothing: what is there must not matter."""
        if name == "floats" or name not in self.floats:
            raise AttributeError(name)
        x = torch.tensor(self.floats[name], dtype=torch.float64)
        return x if name == "rewards" else torch.where(self.mask, x, torch.nan)

    @property
    def layout(self) -> tuple[Tensor, Tensor]:
        return self.mask, self.lengths


def estimator_inputs(rewards: Tensor, mask: Tensor, lengths: Tensor, groups: Tensor, **more: Any) -> EstimatorInputs:
    """Every row an episode of its own unless told otherwise."""
    known = {"episodes": torch.arange(len(lengths)), "behaviour": torch.zeros_like(rewards)}
    return EstimatorInputs(rewards=rewards, mask=mask, lengths=lengths, groups=groups, **known | more)


def correction_inputs(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    lengths: Tensor,
    current: Tensor | None = None,
    advantages: Tensor | None = None,
) -> CorrectionInputs:
    """The current policy is the proximal one, and no token has an advantage, unless told otherwise."""
    return CorrectionInputs(
        proximal=proximal,
        behaviour=behaviour,
        mask=mask,
        lengths=lengths,
        current=proximal if current is None else current,
        advantages=torch.zeros_like(proximal) if advantages is None else advantages,
    )


def loss_inputs(
    current: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, lengths: Tensor, **more: Any
) -> LossInputs:
    """The behaviour is the proximal policy, and every weight 1, unless told otherwise."""
    known: dict[str, Any] = {
        "behaviour": proximal,
        "weights": torch.ones_like(proximal),
        "groups": torch.zeros_like(lengths),
        "episodes": torch.arange(len(lengths)),
        "rewards": torch.zeros_like(proximal),
        "generator": torch.Generator().manual_seed(0),
    }
    layout = {"mask": mask, "lengths": lengths}
    return LossInputs(current=current, proximal=proximal, advantages=advantages, **layout, **known | more)


def split(given: dict[str, Any], kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """What are fields of the inputs, and what are options."""
    fields = {k: v for k, v in given.items() if k in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    return fields, {k: v for k, v in given.items() if k not in fields}


def special() -> dict[str, Flat]:
    """Each special case once: ratios of e^±25, several rows an episode, no policy token at all, no token at all."""
    return {
        "extreme": Flat(11, extreme=True),
        "several_rows": Flat(12, several_rows=True),
        "several_rows_extreme": Flat(13, several_rows=True, extreme=True),
        "no_policy_token": Flat(14, empty=True),
        "no_token": Flat(15, tokens=False),
    }


FLATS = {f"seed{seed}": Flat(seed) for seed in range(8)} | special()


Change = Callable[[str, Tensor], Tensor]
"""What happens to an input of the given name."""


def shuffled(flat: Flat, seed: int) -> tuple[Change, Tensor]:
    """Episodes in another order, the rows of each as they were; and the new order of tokens."""
    names = flat.episodes.unique()
    names = names[torch.randperm(names.numel(), generator=torch.Generator().manual_seed(seed))]
    rows = torch.cat([(flat.episodes == e).nonzero().squeeze(1) for e in names])
    cuts = list(torch.arange(flat.mask.numel()).split(flat.lengths.tolist()))
    tokens = torch.cat([cuts[int(b)] for b in rows])
    return lambda name, x: x[rows] if name in PER_ROW else x[tokens], tokens


def with_a_masked_token(flat: Flat, seed: int) -> tuple[Change, Tensor]:
    """One more token, of nobody, at the end of some row; and where the others now are."""
    b = seed % flat.lengths.numel()
    at = int(flat.lengths[: b + 1].sum())

    def change(name: str, x: Tensor) -> Tensor:
        if name in PER_ROW:
            return x + torch.nn.functional.one_hot(torch.tensor(b), x.numel()) if name == "lengths" else x
        filler: Any = False if name == "mask" else 0.0 if name == "rewards" else torch.nan
        filler = -1 if name in ("turn_of", "states") else filler
        return torch.cat([x[:at], torch.tensor([filler], dtype=x.dtype), x[at:]])

    size = flat.mask.numel() + 1
    return change, torch.cat([torch.arange(at), torch.arange(at + 1, size)])


def close(got: Tensor, expected: object) -> None:
    """Equal to 1e-9 in float64."""
    want = torch.as_tensor(expected, dtype=torch.float64)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.detach(), want, rtol=1e-9, atol=1e-9)
