"""Are the logits of an exported model those of the sharded one, bit for bit?

Loads the newest checkpoint of a run into shards, the directory that the run exported into an
ordinary model of `transformers`, and lets both answer the same tokens:

    torchrun --nproc-per-node 2 examples/smollm2/same_logits.py runs/finetune
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwise

QUESTION = "What does os.walk do in Python?"


def main(run: Path) -> int:
    dist.init_process_group("gloo")
    exported = run / "model"
    base = tomllib.loads((run / "config.toml").read_text())["model"]["path"]
    with torch.device("meta"):
        sharded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(exported))
    shardwise.shard_model(sharded, unit=tuple(sharded._no_split_modules))
    shardwise.load_pretrained(sharded, base)  # then every weight is that of the checkpoint
    manager = shardwise.CheckpointManager(run / "checkpoints")
    checkpoint, _ = manager.latest()
    if checkpoint is None:
        print(f"{run}: no checkpoint there", file=sys.stderr)
        return 2
    step = manager.load(checkpoint, sharded).step
    manager.close()

    plain = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(exported)(QUESTION, return_tensors="pt").input_ids
    with torch.no_grad():
        ours = sharded.eval()(tokens, use_cache=False).logits
        theirs = plain.eval()(tokens, use_cache=False).logits
    largest = float((ours - theirs).abs().max())
    if dist.get_rank() == 0:
        print(
            f"{exported} beside step {step} on {dist.get_world_size()} ranks: "
            f"{ours.numel():,} logits, largest difference {largest:g}"
        )
    dist.destroy_process_group()
    return int(largest != 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
