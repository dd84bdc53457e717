"""Finds prompts that are too long, before the run and in parallel, and cuts or drops them.

Tokens are counted in worker processes, because the process that opens a source (the buffer) loads no tokenizer.
The counts are cached on disk, so that the next process that opens the same data with the same model need not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rich.console import Console
from rich.progress import track

from asyncrl.config import ModelConfig
from asyncrl.data.base import prompt_messages
from asyncrl.errors import ConfigError
from asyncrl.model import load_tokenizer, resolve_path

log = logging.getLogger(__name__)
OverLong = Literal["error", "drop", "truncate_left", "truncate_middle"]
Prompt = str | list[dict[str, Any]]
K = TypeVar("K", bound=Hashable)

_CHUNK = 256
"""Prompts that a worker takes at once."""


@dataclass(frozen=True, slots=True)
class Fit:
    tokens: int
    """Tokens of the prompt as the model reads it, with chat template and generation prompt, without tools."""
    cut: Prompt | None = None
    """The prompt cut to fit; None if it was short enough, or `over_long` does not cut."""


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that is used here."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> Any: ...


@dataclass(eq=False, kw_only=True)
class PromptLimit:
    """What is done about prompts that are too long: options of a source."""

    max_prompt_tokens: int | None = None
    """A longer prompt is treated as `over_long` says; None: lengths are not checked."""
    over_long: OverLong = "error"
    """error, drop, truncate_left (the end stays) or truncate_middle (both ends stay)."""
    workers: int | None = None
    """Processes that count tokens; None: one per core."""
    model: str = "quickstart"
    """Whose tokenizer counts; asyncrl passes `model.path`."""

    def _fit(self, prompts: Mapping[K, Prompt], name: Callable[[K], str]) -> tuple[list[K], dict[K, Prompt]]:
        """The keys of prompts that fit or were cut, and the cut prompts. `name` names a prompt in errors."""
        most = self.max_prompt_tokens
        if most is None:
            return list(prompts), {}
        fits = fit_prompts(list(prompts.values()), self.model, most, self.over_long, self.workers)
        too_long = {key: fit for key, fit in zip(prompts, fits, strict=True) if fit.tokens > most}
        if not too_long:
            return list(prompts), {}
        counts = f"{len(too_long)} of {len(prompts)} prompts have more than {most} tokens"
        if self.over_long == "error":
            worst = max(too_long, key=lambda key: too_long[key].tokens)
            raise ConfigError(
                f"data.options.max_prompt_tokens is {most}, and {counts} ({name(worst)} has {too_long[worst].tokens}): "
                "set data.options.over_long to drop, truncate_left or truncate_middle, or raise it."
            )
        log.warning("%s: %s", counts, "dropped" if self.over_long == "drop" else "cut")
        if self.over_long == "drop":
            return [key for key in prompts if key not in too_long], {}
        return list(prompts), {key: fit.cut for key, fit in too_long.items() if fit.cut is not None}


def fit_prompts(
    prompts: Sequence[Prompt], model: str, max_tokens: int, over_long: OverLong, workers: int | None = None
) -> list[Fit]:
    """One `Fit` per prompt, counted by `workers` processes (default: one per core) unless it is cached.

    Raises ConfigError for a prompt that cannot be cut to `max_tokens`, and if the model has no tokenizer.
    """
    cutting = over_long if over_long.startswith("truncate") else None
    file = _cache_folder() / f"{_key(prompts, model, [max_tokens, cutting] if cutting else [])}.json"
    if file.is_file():
        return [Fit(*entry) for entry in json.loads(file.read_text(encoding="utf-8"))]
    chunks = [prompts[at : at + _CHUNK] for at in range(0, len(prompts), _CHUNK)]
    count = max(1, min(workers or os.cpu_count() or 1, len(chunks)))
    # Spawned, because a fork would copy the threads and sockets of this process.
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        done = pool.map(_fit_chunk, chunks, *([value] * len(chunks) for value in (model, max_tokens, cutting)))
        console = Console(stderr=True)
        fits = [
            fit
            for chunk in track(
                done, "counting prompt tokens", total=len(chunks), console=console, disable=not console.is_terminal
            )
            for fit in chunk
        ]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps([[fit.tokens, fit.cut] for fit in fits]), encoding="utf-8")
        temporary.replace(file)
    except OSError as error:  # each process that opens the data then counts again
        log.warning("prompt lengths cannot be cached in %s (%s): set XDG_CACHE_HOME", file.parent, error.strerror)
    return fits


def fit(prompt: Prompt, tokenizer: Tokenizer, max_tokens: int, cutting: OverLong | None) -> Fit:
    """Count the tokens; with `cutting`, shorten the last user message until the prompt fits, or raise ConfigError."""
    messages = prompt_messages({"prompt": prompt})
    tokens = _count(messages, tokenizer)
    if tokens <= max_tokens or cutting is None:
        return Fit(tokens)
    at = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    text = messages[at]["content"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    keep = len(ids) - (tokens - max_tokens)
    while keep > 0:
        messages[at] = {
            **messages[at],
            "content": tokenizer.decode(_kept(ids, keep, cutting), skip_special_tokens=False),
        }
        over = _count(messages, tokenizer) - max_tokens
        if over <= 0:
            return Fit(tokens, messages[at]["content"] if isinstance(prompt, str) else messages)
        keep -= over  # a cut text may take more tokens than its part of the uncut one
    raise ConfigError(
        f"data.options.max_prompt_tokens is {max_tokens}, and a prompt of {tokens} tokens has more than that outside "
        "its last user message, so that nothing of it would be left: raise it, or set data.options.over_long to drop."
    )


def _kept(ids: list[int], keep: int, cutting: OverLong) -> list[int]:
    if cutting == "truncate_left":
        return ids[-keep:]
    head = keep - keep // 2
    return ids[:head] + (ids[-(keep // 2) :] if keep // 2 else [])


def _count(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> int:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return len(tokenizer.encode(text, add_special_tokens=False))


def _fit_chunk(prompts: Sequence[Prompt], model: str, max_tokens: int, cutting: OverLong | None) -> list[Fit]:
    tokenizer = _tokenizer(model)
    return [fit(prompt, tokenizer, max_tokens, cutting) for prompt in prompts]


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Tokenizer:
    tokenizer: Tokenizer = load_tokenizer(ModelConfig(path=model))
    return tokenizer


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncrl" / "prompt_tokens"


def _key(prompts: Sequence[Prompt], model: str, cut: list[Any]) -> str:
    digest = hashlib.blake2b(json.dumps(cut).encode(), digest_size=16)
    folder = resolve_path(ModelConfig(path=model))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for prompt in prompts:
        digest.update(json.dumps(prompt).encode())
    return digest.hexdigest()
