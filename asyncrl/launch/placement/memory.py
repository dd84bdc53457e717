"""Whether the processes of a run fit the memory of their GPUs, and what to change where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.cards import GIB, Card
from asyncrl.launch.placement.engine_memory import EngineMemory, memory_of_engine
from asyncrl.launch.placement.plan import Placed

if TYPE_CHECKING:
    from asyncrl.learner.budget.memory import LearnerMemory

REFUSE, WARN = 1.15, 0.9
"""Shares of a card above which a start is refused, and warned about: fragments and what is not computed need room."""


@dataclass(frozen=True, slots=True)
class Budget:
    card: Card
    learner: LearnerMemory
    engine: EngineMemory | None
    """None: the engine computes on no GPU of this run."""
    share: float
    """Share of the card that its fullest GPU needs."""
    fullest: str
    """The processes on that GPU."""
    remedies: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One sentence."""
        state = "does not fit" if self.share > REFUSE else "is close to the limit" if self.share > WARN else "fits"
        needs = f"{self.fullest} {state}: {self.share:.2f} of {self.card.name} ({gib(self.card.memory)})"
        return f"{needs}. {'; '.join(self.remedies)}".rstrip(". ") + "."


def budget(config: Config, model: Any, card: Card, placed: Sequence[Placed]) -> Budget:
    """Memory of the run as it is placed. `model`: its transformers config. Raises ConfigError for a backend whose
    memory is not known."""
    from asyncrl.learner.budget.memory import memory_of_learner

    learner = memory_of_learner(config, model)
    engine = None
    if any(p.role.startswith("actor") and (p.gpus or p.wanted) for p in placed):
        engine = memory_of_engine(config, model, parameters_of(model), card.memory)
    shares = [*_shares(placed, learner, engine, card), _of_its_bound(config, learner, card)]
    share, fullest = max(shares)
    found = Budget(card, learner, engine, share, fullest)
    return replace(found, remedies=tuple(_remedies(config, model, found)) if share > WARN else ())


def parameters_of(model: Any) -> int:
    from asyncrl.learner.budget.fake_pass import parameters

    return parameters(model)


def with_memory(placed: Sequence[Placed], found: Budget) -> list[Placed]:
    """The table's rows with the planned memory of each GPU."""
    return [replace(p, memory=gib(n) if (n := _bytes_of(p, found.learner, found.engine)) else "") for p in placed]


def details(config: Config, found: Budget) -> list[str]:
    """What the memory is for, as text."""
    held = ", ".join(f"{name} {gib(size)}" for name, size in found.learner.parts.items() if size > 0.005 * GIB)
    lines = [
        f"learner, in a micro-batch of {found.learner.tokens} tokens: {held}",
        f"  {found.learner.flops / 1e12:.1f} TFLOP forward and backward",
    ]
    if (engine := found.engine) is not None:
        lines.append(
            f"engine: takes {gib(engine.taken)} of each GPU, needs {gib(engine.needed)}; its cache holds {engine.rows} "
            f"rows of env.max_tokens {config.env.max_tokens}"
        )
    return [*lines, found.verdict]


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _bytes_of(p: Placed, learner: LearnerMemory, engine: EngineMemory | None) -> float:
    """On each GPU of the process."""
    if not (p.gpus or p.wanted):
        return 0.0
    if p.role.startswith("learner"):
        in_flight = 0 if p.role == "learner" else learner.parts.get("weights in flight", 0)
        return learner.total - in_flight
    if p.role.startswith("actor") and engine is not None:
        return max(engine.taken, engine.needed)
    return 0.0


def _shares(
    placed: Sequence[Placed], learner: LearnerMemory, engine: EngineMemory | None, card: Card
) -> Iterator[tuple[float, str]]:
    """For each GPU, the share of it that is needed, and by which processes."""
    slots: dict[tuple[str, Any], list[Placed]] = {}
    for p in placed:
        # Where Ray chooses the node, no two processes are known to share a GPU.
        alone = [p.role] if p.wanted else []
        for slot in p.gpus or alone:
            slots.setdefault((p.node, slot), []).append(p)
    for sharing in slots.values():
        needed = sum(_bytes_of(p, learner, engine) for p in sharing)
        yield needed / card.memory, " and ".join(p.role for p in sharing)


def _of_its_bound(config: Config, learner: LearnerMemory, card: Card) -> tuple[float, str]:
    """The learner's share of what it may use."""
    bound = config.learner.gpu_memory
    return learner.total / (bound * card.memory), f"learner, which may use learner.gpu_memory {bound:g},"


def _remedies(config: Config, model: Any, found: Budget) -> Iterator[str]:
    """What would bring the fullest GPU below the limit, the cheapest first."""
    if "learner" in found.fullest:
        yield from _of_learner(config, model, found)
    if "actor" in found.fullest:
        yield "lower actors.engine_options.gpu_memory, or give the engine GPUs of its own, or raise tensor_parallel"


def _of_learner(config: Config, model: Any, found: Budget) -> Iterator[str]:
    learner = config.learner
    if learner.activation_checkpointing != "full":
        lighter = _with(config, activation_checkpointing="full")
        yield f"learner.activation_checkpointing full needs {gib(_total(lighter, model))} for the learner"
    if learner.tokens_per_micro_batch > config.env.max_tokens:
        yield f"lower learner.tokens_per_micro_batch ({learner.tokens_per_micro_batch})"
    if (ranks := _enough_ranks(config, model, found)) is not None:
        yield f"learner.backend fsdp2 with learner.ranks {ranks} and learner.activation_checkpointing full, a GPU each"


def _with(config: Config, **fields: Any) -> Config:
    return config.model_copy(update={"learner": config.learner.model_copy(update=fields)})


def _total(config: Config, model: Any) -> int:
    from asyncrl.learner.budget.memory import memory_of_learner

    return memory_of_learner(config, model).total


def _enough_ranks(config: Config, model: Any, found: Budget) -> int | None:
    """The fewest ranks, a power of two, of which each fits its GPU alone, with checkpointing; None: not up to 64."""
    from asyncrl.learner.budget.fake_pass import cost_of_pass
    from asyncrl.learner.budget.memory import parts

    def sharded(ranks: int) -> Config:
        return _with(config, backend="fsdp2", activation_checkpointing="full", ranks=ranks)

    cost = cost_of_pass(sharded(1), model, gpu=True)
    most = WARN * found.card.memory
    tried = (2**n for n in range(1, 7) if 2**n > config.learner.ranks)
    return next((n for n in tried if sum(parts(sharded(n), cost).values()) < most), None)


def refuse_or_warn(config: Config, found: Budget) -> list[str]:
    """Warnings. Raises ConfigError above the limit, unless `launch.memory_check` only warns."""
    said, share = found.verdict, found.share
    if found.engine is not None and not found.engine.rows:
        share = REFUSE + 1.0
        said = (
            f"actors.engine_options.gpu_memory gives the engine {gib(found.engine.taken)} of {found.card.name}, and "
            f"its weights and one row of env.max_tokens need {gib(found.engine.needed)}: raise it, or tensor_parallel."
        )
    if share > REFUSE and config.launch.memory_check == "refuse":
        raise ConfigError(f"{said} launch.memory_check warn starts anyway.")
    return [said] if share > WARN else []
