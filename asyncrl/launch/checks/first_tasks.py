"""Checks the first tasks of each source against what the environment, the score and the model need.

Draws one task of each source, which must be right, and as many of the following as half a second allows, whose faults
are warnings.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.actors.envs import ENVIRONMENTS
from asyncrl.buffer.tasks.drawing import checked_task
from asyncrl.config import Config
from asyncrl.data.base import Task, TaskSource, prompt_messages
from asyncrl.data.checked import UNREADABLE, readable
from asyncrl.errors import ConfigError, RunError
from asyncrl.model import local_path, resolve_path
from asyncrl.plugins import resolve
from asyncrl.rewards.spec import parse

SAMPLED = 256
SAMPLE_S = 0.5
_MAY_LACK_TRUTH = ("asyncrl.rewards.scores.judge", "asyncrl.rewards.scores.reward_model")


@dataclass(frozen=True, slots=True)
class Needs:
    """What the tasks of one environment need."""

    score: str
    """A score that cannot do without the ground truth; empty: none."""
    max_tokens: int
    field: str = ""
    """The field of a task that a teacher is shown (`learner.teacher.answer_field`)."""


def check_first_tasks(config: Config, source: TaskSource) -> tuple[list[Task], list[str]]:
    """The first good task of each source, and warnings about further ones. Raises ConfigError."""
    needs, count, mixed = _needs_of(config), _counter(config), config.data.source == "mix"
    seen = _Seen()
    until = time.monotonic() + SAMPLE_S
    for index in range(min(SAMPLED, source.train_size or SAMPLED)):
        if seen.good and time.monotonic() > until:
            break
        task = _drawn(source, index)
        name = str(task.get("env", "")) if mixed else ""
        seen.note(name, task, problem_of(task, needs(name), count))
    if hopeless := seen.hopeless():
        raise ConfigError(hopeless)
    return list(seen.good.values()), seen.warnings()


def _drawn(source: TaskSource, index: int) -> Task:
    place = f"task {index}"
    try:
        return checked_task(readable(lambda: source.task(index), place), place)
    except RunError as error:
        return {"id": place, "prompt": "", UNREADABLE: str(error).partition("; correct the source")[0]}


@dataclass(slots=True)
class _Seen:
    """The tasks that were looked at, by the name of their source in a mix."""

    good: dict[str, Task] = field(default_factory=dict)
    """The first one."""
    wrong: dict[str, list[str]] = field(default_factory=dict)
    """What is wrong with the others."""
    count: int = 0

    def note(self, name: str, task: Task, problem: str) -> None:
        self.count += 1
        if problem:
            self.wrong.setdefault(name, []).append(problem)
        else:
            self.good.setdefault(name, task)

    def hopeless(self) -> str:
        """The problem of a source none of whose tasks is good; empty if there is no such source."""
        for name, problems in self.wrong.items():
            if name not in self.good:
                also = f" All {len(problems)} tasks that were looked at have such a fault." if len(problems) > 1 else ""
                return problems[0] + also
        return ""

    def warnings(self) -> list[str]:
        return [
            f"{len(problems)} of the first {self.count} tasks cannot be played and will be dropped as env_error; the "
            f"first: {problems[0]}"
            for problems in self.wrong.values()
        ]


def problem_of(task: Task, needs: Needs, count: Callable[[str], int] | None) -> str:
    """What the task lacks; empty if nothing. Pure."""
    if problem := task.get(UNREADABLE):
        return f"{str(problem).removesuffix('.')}. Correct the source or the row."
    name = f"task {task['id']!r} of data.source"
    if needs.score:
        inner = task.get("reward_model")
        truth = inner.get("ground_truth") if isinstance(inner, Mapping) else task.get("ground_truth")
        if truth is None:
            has = ", ".join(map(str, task))
            return (
                f"{name} has no ground_truth, which the score {needs.score} needs; its keys are {has}. Map a column "
                "with data.options.columns: {ground_truth: COLUMN}, drop the row, or give the score's parameter "
                "`ground_truth` a default."
            )
    if needs.field and task.get(needs.field) is None:
        return (
            f"{name} has no {needs.field}, which learner.teacher.shown shows to the teacher; its keys are "
            f"{', '.join(map(str, task))}. Name another in learner.teacher.answer_field, or set shown feedback."
        )
    tokens = 0 if count is None else sum(count(_text(message)) for message in prompt_messages(task))
    if tokens >= needs.max_tokens:
        return (
            f"{name} has a prompt of {tokens} tokens, and env.max_tokens, for prompt and answers together, is "
            f"{needs.max_tokens}: raise env.max_tokens, or leave long prompts out (data.options.max_prompt_tokens and "
            "over_long: drop, of the source `datasets`)."
        )
    return ""


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _needs_of(config: Config) -> Callable[[str], Needs]:
    """The needs by the name of a source; one for all, unless the environment is a mix."""
    envs = config.env.options.get("envs", {}) if config.env.name == "mix" else {}
    given = config.learner.teacher
    field = given.answer_field if given.hints and given.shown == "answer" else ""
    alone = Needs("", config.env.max_tokens, field)
    if not envs:
        alone = Needs(_score_of(config.env.name, config.env.options), config.env.max_tokens, field)
    by_name = {
        name: Needs(
            _score_of(spec["name"], spec.get("options", {})),
            int(min(config.env.max_tokens, spec.get("max_tokens", config.env.max_tokens))),
            field,
        )
        for name, spec in envs.items()
    }
    return lambda name: by_name.get(name, alone)


def _score_of(name: str, options: Mapping[str, Any]) -> str:
    """The score of an environment if it cannot do without the ground truth."""
    parameters: Mapping[str, inspect.Parameter] = {}
    make = resolve(name, ENVIRONMENTS, "env.name")
    if inspect.isclass(make):
        parameters = inspect.signature(make).parameters
    default = parameters["score"].default if "score" in parameters else None
    spec = options.get("score", default)
    if "score" not in parameters or not isinstance(spec, str | dict | list):
        return ""
    for part in parse(spec, "env.options.score"):
        called: Any = getattr(part.score, "__call__", None) if inspect.isclass(part.score) else part.score  # noqa: B004
        if part.score.__module__ in _MAY_LACK_TRUTH or called is None:
            continue
        truth = inspect.signature(called).parameters.get("ground_truth")
        if truth is not None and truth.default is truth.empty and "ground_truth" not in part.options:
            return part.label
    return ""


def _counter(config: Config) -> Callable[[str], int] | None:
    """Counts the tokens of a text, by the model's tokenizer.json alone; None: it has none here."""
    local = config.model.path == "quickstart" or local_path(config.model) is not None
    file = resolve_path(config.model) / "tokenizer.json" if local else None
    if file is None or not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
