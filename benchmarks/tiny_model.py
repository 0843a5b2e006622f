"""What the benchmarks of fine-tuning run on where no model is given: a directory of `transformers`
with a random Llama of two layers and a tokenizer of bytes, and chats with unequal answers."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
# As SmolLM2 has it, without a message of the system.
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_model(folder: Path) -> Path:
    """The directory; the same weights each time."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_chats(file: Path, count: int = 120) -> Path:
    """All different; answers of several lengths, so that batches hold unequal numbers of tokens."""
    lines = []
    for number in range(count):
        answer = f"It is {number}." + " And so on." * (number * 7 % 11)
        turns = [("user", f"What is {number}?"), ("assistant", answer)]
        chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
        lines.append(json.dumps(chat))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
