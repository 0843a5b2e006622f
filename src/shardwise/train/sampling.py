"""What the model says at an evaluation: `log.samples`, continued greedily by the sharded model.

All ranks run the same prompts and equally many forwards, since they gather parameters together; so
a text that has ended early costs as many. There is no cache of keys and values, whose form models
choose: a token costs a forward of all that stands before it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from shardwise.train.running import Job


@torch.no_grad()
def sample_texts(job: Job, tokenizer: Any) -> list[tuple[str, str]]:
    """Prompt and continuation of each of `log.samples`. Collective."""
    job.model.eval()
    log = job.config.log
    return [(p, continued(job, tokenizer, p, log.sample_tokens)) for p in log.samples]


def continued(job: Job, tokenizer: Any, prompt: str, num_tokens: int) -> str:
    """What follows a prompt, which is a user's turn where the job trains on chats."""
    if job.config.data.format in ("chat", "instruction") and tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        given = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        given = tokenizer(prompt, return_tensors="pt")
    ids = given["input_ids"].to(job.device)
    first, keep = ids.shape[1], {"logits_to_keep": 1}
    if "logits_to_keep" not in inspect.signature(job.model.forward).parameters:
        keep = {}
    for _ in range(num_tokens):
        logits = job.model(input_ids=ids, use_cache=False, **keep).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
    made = ids[0, first:].tolist()
    if tokenizer.eos_token_id in made:
        made = made[: made.index(tokenizer.eos_token_id)]
    return tokenizer.decode(made, skip_special_tokens=True).strip()
