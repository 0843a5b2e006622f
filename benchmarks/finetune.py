"""A step of fine-tuning a model of transformers, beside a hand-written loop over torch's FSDP2.

    python benchmarks/finetune.py MODEL_DIR [--json FILE] [--rounds 5] [--steps 4]
    python benchmarks/finetune.py --tiny            a random model of two layers: does it all work?

2 ranks, 2 rows of 256 tokens each, float32, fused AdamW, a unit for each decoder layer and the
root's, once without and once with recomputation (transformers' own, inside the units, for both).
Both engines run the same model, loss and batches; turns, memory (summed PSS) and the check that all
train the same model are those of `shardwise bench`. Rows:

    fsdp2, shardwise                        the loss of transformers: all logits
    fsdp2@LOSS=chunked, shardwise@...       the chunked loss (`train/loss/`), under both engines

The last line of stdout is the result; `step_to_fsdp2` and `memory_to_fsdp2` are the ratios to the
row `fsdp2` of the same case.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.bench.command import run_plans
from shardwise.bench.compare import Plan
from shardwise.bench.engines import parse_engines
from shardwise.bench.workload import NUM_BATCHES, SEED, Batch
from shardwise.errors import ConfigError

ENGINES = "fsdp2,shardwise,fsdp2@LOSS=chunked,shardwise@LOSS=chunked"
LEARNING_RATE = 1e-5  # small steps: what is learnt of random tokens does not matter


@dataclass(frozen=True, slots=True)
class FinetuneWorkload:
    """A causal model of transformers on rows of tokens. `LOSS` in the environment of its ranks
    chooses the loss."""

    path: str  # empty: a tiny random one
    rows: int
    length: int
    is_recomputed: bool
    unit: str | int | tuple[str, ...]
    items: str = "tokens"

    @property
    def name(self) -> str:
        how = "recomputed" if self.is_recomputed else "kept"
        return f"{Path(self.path).name or 'tiny'}, activations {how}"

    def build(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        from shardwise.train.loss.causal import use_token_loss

        torch.manual_seed(SEED)
        if self.path:
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        else:
            model = tiny()
        if self.is_recomputed:
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        if os.environ.get("LOSS") == "chunked":
            use_token_loss(model, "on")
        return model.train()

    def batches(self, rank: int, num_ranks: int) -> list[Batch]:
        import torch

        vocab = config_of(self.path).vocab_size
        found = []
        for number in range(NUM_BATCHES):
            draw = torch.Generator().manual_seed(SEED + number * num_ranks + rank)
            tokens = torch.randint(vocab, (self.rows, self.length), generator=draw)
            found.append(Batch((), {"input_ids": tokens, "labels": tokens, "use_cache": False}))
        return found

    def num_items(self, batch: Batch) -> int:
        return self.rows * self.length


def config_of(path: str) -> Any:
    from transformers import AutoConfig, LlamaConfig

    if path:
        return AutoConfig.from_pretrained(path)
    return LlamaConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip


def tiny() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(config_of(""))


def layers_of(path: str) -> tuple[str, ...]:
    """The classes of its decoder layers, as the job takes them for units."""
    import torch
    from transformers import AutoModelForCausalLM

    from shardwise.train.hf.prepare import units_of

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(path)) if path else tiny()
    return tuple(units_of(model))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="", metavar="MODEL_DIR")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", help="write the result there too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="in a round")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--engines", default=ENGINES)
    parser.add_argument("--only", choices=("kept", "recomputed"), help="one of the two cases")
    parser.add_argument("--no-memory", action="store_true", help="times alone")
    parser.add_argument("--limit-s", type=float, default=0.0, help="0: no limit")
    args = parser.parse_args()
    if args.tiny == bool(args.model):
        parser.error("give the directory of a model, or --tiny")
    if args.tiny:
        args.rounds, args.steps, args.length = 1, 2, 32
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    workload = FinetuneWorkload(args.model, args.rows, args.length, False, layers_of(args.model))
    plan = Plan(
        workload=workload,
        precision="fp32",
        specs=tuple(parse_engines(args.engines)),
        num_rounds=args.rounds,
        num_steps=args.steps,
        num_warmup=1 if args.tiny else 2,
        lr=LEARNING_RATE,
        with_memory=not args.no_memory,
    )
    cases = {"kept": False, "recomputed": True}
    plans = [
        replace(plan, workload=replace(workload, is_recomputed=recomputed))
        for case, recomputed in cases.items()
        if args.only in (None, case)
    ]
    try:
        return run_plans(plans, args.limit_s, args.json, None)
    except ConfigError as error:
        print(f"benchmarks/finetune.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
