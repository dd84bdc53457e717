"""A slow, plain sampler to judge the model by: every episode at the same position, one token at a time."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from asyncrl.actors.envs.lookup import LookupEnv
from asyncrl.rendering.template import TemplateRenderer

LONGEST = 200


@torch.no_grad()
async def play(model, tokenizer, tasks, temperature, seed=0):
    """The rewards of one episode per task; an episode that is not over after `LONGEST` tokens has reward 0."""
    generator = torch.Generator().manual_seed(seed)
    renderer = TemplateRenderer(tokenizer)
    envs = [LookupEnv() for _ in tasks]
    chats = [await env.reset(task) for env, task in zip(envs, tasks, strict=True)]
    tools = [tool.schema for tool in envs[0].tools]
    rows = [renderer.render_initial(chat, tools) for chat in chats]
    said = [[] for _ in tasks]
    rewards = [None for _ in tasks]
    cache = DynamicCache(config=model.config)
    for position in range(LONGEST):
        ids = torch.tensor([[row[position] if position < len(row) else tokenizer.pad_token_id] for row in rows])
        logits = model(input_ids=ids, past_key_values=cache).logits[:, -1]
        if temperature:
            sampled = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0].tolist()
        else:
            sampled = logits.argmax(-1).tolist()
        for i, token in enumerate(sampled):
            if rewards[i] is not None or position + 1 < len(rows[i]):
                continue
            rows[i].append(token)
            said[i].append(token)
            if token in renderer.stop_token_ids:
                chats[i].append(renderer.parse(said[i]))
                turn = await envs[i].step(chats[i][-1])
                said[i] = []
                if turn.done:
                    rewards[i] = turn.reward
                else:
                    rows[i] += renderer.render_tail(chats[i], turn.messages, tools)
                    chats[i] += turn.messages
        if all(reward is not None for reward in rewards):
            break
    return [reward or 0.0 for reward in rewards]
