"""The `Trainer` of transformers with `fsdp=True` under `install()`: train with accumulation and
clipping, evaluate, save, resume, generate.

Compared with the same program over torch's `fully_shard` (see trainers_kit.py), and with DDP, where
nothing is sharded: it divides gradients before they are added, hence 1e-4 after four steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainers_kit import (
    ENGINES,
    REPLICAS,
    TOLERANCE,
    accelerate_shards,
    llama,
    same_numbers,
    samples,
    sharded_by,
    using,
    whole,
)

from ranks import on_ranks

pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")
pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

STEPS = 4


def sharding(engine: str, **config: Any) -> dict[str, Any]:
    layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return {} if engine == REPLICAS else {"fsdp": True, "fsdp_config": {**layers, **config}}


def trainer_of(folder: Path, model: Any, *, bf16: bool = False, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        **more,
        output_dir=str(folder),
        use_cpu=True,
        bf16=bf16,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        adam_epsilon=1e-4,  # else a gradient that is nearly zero decides the direction of a step
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    rows: Any = samples(40)
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8])


def history(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def program(engine: str, folder: Path, *, bf16: bool, **config: Any) -> dict[str, Any]:
    sharded = sharding(engine, **config)
    with using(engine), accelerate_shards(engine):
        trainer = trainer_of(folder, llama(tied=True), bf16=bf16, save_steps=STEPS // 2, **sharded)
        trainer.train()
        assert engine == REPLICAS or len(sharded_by(trainer.model, engine)) >= 4
        weights = whole(trainer.model)
        evaluation = trainer.evaluate()["eval_loss"]
        words = trainer.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
        trainer.save_model(str(folder / "model"))
    with using(engine), accelerate_shards(engine):
        resumed = trainer_of(
            folder, llama(tied=True, seed=1), bf16=bf16, save_steps=STEPS // 2, **sharded
        )
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
        for key in ("loss", "grad_norm"):
            assert len(history(trainer, key)) == STEPS
            same_numbers(history(resumed, key), history(trainer, key))
        same_numbers(whole(resumed.model), weights)
    return {
        "loss": history(trainer, "loss"),
        "norms": history(trainer, "grad_norm"),
        "weights": weights,
        "evaluation": [evaluation],
        "words": words[0].tolist(),
    }


@pytest.mark.parametrize(
    ("kind", "bf16"), [("FULL_STATE_DICT", False), ("SHARDED_STATE_DICT", True)]
)
@on_ranks(2, timeout_s=300.0)
def test_train_evaluate_save_resume_generate(kind: str, bf16: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = {"state_dict_type": kind, "activation_checkpointing": bf16}
    torchs, ours = [program(e, tmp_path / e, bf16=bf16, **config) for e in ENGINES]
    for key in torchs:
        same_numbers(ours[key], torchs[key], tolerance=TOLERANCE)
    if not bf16:
        plain = program(REPLICAS, tmp_path / REPLICAS, bf16=False)
        for key in plain:
            same_numbers(ours[key], plain[key], tolerance=1e-4)
    if kind == "FULL_STATE_DICT":  # with sharded ones, their `save_model` writes no weights
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "ours/model")
        weights = {n: t for n, t in saved.state_dict().items() if n in ours["weights"]}
        same_numbers(weights, ours["weights"])


def program_from_pretrained(engine: str, path: Path, folder: Path) -> dict[str, Any]:
    """transformers shards by itself while it loads; Accelerate has no part in it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    def model() -> Any:
        if engine == REPLICAS:
            return AutoModelForCausalLM.from_pretrained(path)
        config = DistributedConfig(fsdp_size=2)
        return AutoModelForCausalLM.from_pretrained(path, distributed_config=config)

    with using(engine), accelerate_shards(REPLICAS):
        trainer = trainer_of(folder, model(), save_strategy="no")  # theirs cannot resume
        assert engine == REPLICAS or len(sharded_by(trainer.model, engine)) >= 4
        before = whole(trainer.model)
        trainer.train()
        weights = whole(trainer.model)
        evaluation = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(folder / "model"))
    return {
        "before": before,
        "loss": history(trainer, "loss"),
        "norms": history(trainer, "grad_norm"),
        "weights": weights,
        "evaluation": [evaluation],
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@on_ranks(2, timeout_s=300.0)
def test_from_pretrained_shards(tied: bool, rank: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    if rank == 0:
        llama(tied=tied).save_pretrained(tmp_path / "start")
    dist.barrier()
    engines = (REPLICAS, *ENGINES)
    results = {e: program_from_pretrained(e, tmp_path / "start", tmp_path / e) for e in engines}
    ours = results["ours"]
    for key in ours:
        if not tied:  # transformers ties behind the sharding, which torch's engine does not follow
            same_numbers(ours[key], results["torch"][key], tolerance=TOLERANCE)
        same_numbers(ours[key], results[REPLICAS][key], tolerance=1e-4)
    dist.barrier()  # the first rank writes
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "ours/model")
    weights = {n: t for n, t in saved.state_dict().items() if n in ours["weights"]}
    same_numbers(weights, ours["weights"])
