"""One rank of TRL's `SFTTrainer`, for trl_losses.py, which starts it: python trl_rank.py SPEC.json

What the spec gives: the model's directory, chats to train on and to evaluate with (JSONL, in the
order in which they are read), sizes, and what else is set in `SFTConfig`. Everything beside that is
TRL's default. The first rank writes what was logged to the spec's `out`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(spec: dict[str, Any]) -> None:
    import torch
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    args = SFTConfig(
        output_dir=spec["folder"],
        use_cpu=True,
        max_steps=spec["steps"],
        per_device_train_batch_size=spec["micro_batch"],
        gradient_accumulation_steps=spec["accumulation"],
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **spec["options"],
    )

    def trainer_of_files() -> Any:
        return SFTTrainer(
            model=spec["model"],
            args=args,
            train_dataset=rows(spec["train"]),
            eval_dataset=rows(spec["held_out"]),
            processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        )

    trainer = trainer_of_files()
    start = evaluations(trainer, spec["eval_batches"])
    if not spec["evaluate_first"]:
        # One that has evaluated does not wrap its model into DDP when it trains: measured by the
        # case that lets it.
        del trainer
        trainer = trainer_of_files()
    trainer.train()
    end = evaluations(trainer, spec["eval_batches"][-1:])
    squares = sum(float(p.detach().double().square().sum()) for p in trainer.model.parameters())
    of_ranks = trainer.accelerator.gather(torch.tensor([squares], dtype=torch.float64)).tolist()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    columns = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
    result = {
        **{name: [entry[key] for entry in logged] for name, key in columns.items()},
        "val_loss_start": start,
        "val_loss_end": end,
        "squared_weights_of_ranks": of_ranks,
        "samples": [[r["input_ids"], r["labels"]] for r in trainer.train_dataset],
    }
    if os.environ.get("RANK", "0") == "0":
        Path(spec["out"]).write_text(json.dumps(result))


def rows(file: str) -> Any:
    from datasets import Dataset

    return Dataset.from_list([json.loads(line) for line in Path(file).read_text().splitlines()])


def evaluations(trainer: Any, sizes: list[int]) -> dict[str, float]:
    """The evaluation loss in batches of these sizes."""
    found = {}
    for size in sizes:
        trainer.args.per_device_eval_batch_size = size
        found[str(size)] = trainer.evaluate()["eval_loss"]
    return found


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
