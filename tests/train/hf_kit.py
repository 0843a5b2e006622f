"""Tiny models of `transformers` with random weights, as directories, and jobs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.distributed as dist
import transformers
from jobs import run_job

VOCAB = 96
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GPT2 = {
    **{k: _BASE[k] for k in ("vocab_size", "bos_token_id", "eos_token_id")},
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "llama_tied": ("LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**_GROUPED, "head_dim": 8, "sliding_window": 16}),
    "gemma3": ("Gemma3TextConfig", {**_GROUPED, "head_dim": 8, "sliding_window": 16}),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 16}),
    "phi": ("PhiConfig", _BASE),
    "phi3": ("Phi3Config", _GROUPED),
    "gpt2": ("GPT2Config", _GPT2),
    "olmo": ("OlmoConfig", _GROUPED),
    "olmo2": ("Olmo2Config", _GROUPED),
    "mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_GROUPED, **_EXPERTS, "head_dim": 8}),
}
JOB = {
    "model.kind": "hf",
    "data.seq_len": 24,
    "train.steps": 2,
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "train.eval_every": 0,
    "train.grad_clip": 0.0,
    "optim.lr": 1e-2,
    "optim.warmup_steps": 0,
    "optim.schedule": "constant",
    "checkpoint.every": 0,
    "checkpoint.rehearsal": False,
    "log.every": 1000,
}


def config_of(name: str) -> Any:
    kind, values = CONFIGS[name]
    return getattr(transformers, kind)(**values)


def new_model(name: str) -> Any:
    """On the CPU, the same weights each time."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(name))


def make_directory(name: str, path: Path, **how: Any) -> Path:
    """The model as a directory; ranks of one test share it."""
    if _is_first():
        new_model(name).save_pretrained(path, **how)
    _wait()
    return path


def make_tokens(folder: Path) -> Path:
    """Tokens to train on, the same in every test."""
    path = folder / "tokens.npy"
    if _is_first():
        i = np.arange(4000)
        np.save(path, ((i * i + i // 7) % (VOCAB - 3) + 3).astype(np.uint16))
    _wait()
    return path


def run_hf_job(run: Path, model: Path, **overrides: Any) -> None:
    values = {key.replace(".", "__"): value for key, value in JOB.items()}
    values |= {"model__path": str(model), "data__source": str(make_tokens(run.parent))}
    run_job(run, bare=True, **{**values, **overrides})


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    model.eval()
    return model(input_ids=torch.arange(3, 43).reshape(2, 20), use_cache=False).logits


def loaded(path: Path, dtype: Any = torch.float32) -> Any:
    """As anybody loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(path: Path, template: str | None = TEMPLATE) -> Any:
    """A tokenizer of whole words for the tiny models, saved to `path`."""
    words = "<pad> <s> </s> <user> <assistant> <system> <unk>".split()
    words += [f"w{number}" for number in range(VOCAB - len(words))]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = template
    made.save_pretrained(path)
    return made
