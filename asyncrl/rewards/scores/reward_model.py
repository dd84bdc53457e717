"""A learned reward model: a sequence classifier of transformers, in its own process and on its own device."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.data.base import Message, Task, prompt_messages
from asyncrl.rewards.isolation.processes import InProcesses
from asyncrl.rewards.wrappers import Batched


class RewardModel:
    """The classifier's output for the prompt with the answer, as its chat template writes them."""

    def __init__(
        self,
        path: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        label: int = 0,
        max_tokens: int = 4096,
        batch_size: int = 16,
        wait_s: float = 0.05,
        timeout_s: float = 300.0,
    ) -> None:
        """
        Args:
            path: a Hugging Face folder or hub name of a sequence classifier.
            device: of torch, e.g. `cuda:1`; one process per actor loads the model there.
            label: which of the classifier's outputs is the reward.
            max_tokens: a longer conversation is cut at its beginning.
            batch_size: answers computed together, at most.
            wait_s: how long the first of them waits for others.
            timeout_s: for one batch, at the first also to load the model; keep `env.call_s` above it.
        """
        options: Mapping[str, Any] = {
            "path": path, "device": device, "dtype": dtype, "label": label, "max_tokens": max_tokens
        }  # fmt: skip
        alone = InProcesses(functools.partial(classify, **options), timeout_s=timeout_s, processes=1)
        self._score = Batched(alone, size=batch_size, wait_s=wait_s, plural={"conversation": "conversations"})

    async def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        *,
        task: Task,
    ) -> Any:
        answer = {"role": "assistant", "content": solution_str}
        return await self._score(conversation=[*prompt_messages(task), answer])


def classify(
    conversations: Sequence[Sequence[Message]], *, path: str, device: str, dtype: str, label: int, max_tokens: int
) -> list[float]:
    """One number per conversation. Raises ValueError for a label that the model does not have."""
    import torch

    tokenizer, model = _loaded(path, device, dtype)
    if not 0 <= label < model.config.num_labels:
        raise ValueError(f"reward_model.label is {label}; {path} has {model.config.num_labels} outputs")
    rows = [_ids(tokenizer, conversation)[-max_tokens:] for conversation in conversations]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    pad = model.config.pad_token_id if model.config.pad_token_id is not None else 0
    ids.fill_(pad)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    with torch.inference_mode():
        logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
    return [float(x) for x in logits[:, label].float().cpu()]


def _ids(tokenizer: Any, conversation: Sequence[Message]) -> list[int]:
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    else:
        text = "\n\n".join(message.get("content") or "" for message in conversation)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template)
    return ids


@functools.lru_cache(maxsize=1)
def _loaded(path: str, device: str, dtype: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=getattr(torch, dtype))
    if model.config.pad_token_id is None:
        # The classifier reads the last token that is not padding, so it must know the padding of a batch.
        model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return tokenizer, model.to(device).eval()
