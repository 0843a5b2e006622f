"""TRL's `SFTTrainer` and `DPOTrainer` under `install()`, whole models and adapters of peft.

`DPOTrainer` takes its reference from the model itself: between two forwards of one step it switches
adapters off, or to a frozen copy called "ref"; without adapters it shards a second model.

Compared with the same program over torch's `fully_shard` (see trainers_kit.py), and with DDP, where
nothing is sharded: it divides gradients before they are added, hence 1e-4 after four steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainers_kit import (
    ENGINES,
    REPLICAS,
    TOLERANCE,
    VOCABULARY,
    accelerate_shards,
    llama,
    same_numbers,
    sharded_by,
    using,
    whole,
)

from ranks import on_ranks

pytest.importorskip("trl", reason="the extra 'integrations' is not installed")
pytest.importorskip("peft", reason="the extra 'hf' is not installed")

STEPS, MAX_NORM = 4, 0.05
KINDS = ("whole", "new adapter", "trained adapter")


def tokenizer() -> Any:
    """Words w0, w1, ... by number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = special + [f"w{i}" for i in range(VOCABULARY - len(special))]
    table = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=table, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def texts(number: int, *columns: str) -> Any:
    """Rows of three to ten words, the same on all ranks."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(3)

    def text() -> str:
        length = int(torch.randint(3, 11, (), generator=generator))
        numbers = torch.randint(VOCABULARY - 4, (length,), generator=generator)
        return "".join(f" w{n}" for n in numbers)

    return Dataset.from_list([{c: text() for c in columns} for _ in range(number)])


def settings(engine: str, folder: Path) -> dict[str, Any]:
    layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    sharding = {} if engine == REPLICAS else {"fsdp": True, "fsdp_config": layers}
    return {
        **sharding,
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": MAX_NORM,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,  # else a gradient that is nearly zero decides the direction of a step
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def lora() -> Any:
    from peft import LoraConfig

    modules = ["q_proj", "v_proj"]
    return LoraConfig(r=2, lora_alpha=4, target_modules=modules, task_type="CAUSAL_LM")


def model_and_adapter(kind: str) -> tuple[Any, dict[str, Any]]:
    """What the user hands over: a model, and what else the trainer takes."""
    from peft import get_peft_model

    model = llama()
    if kind == "whole":
        return model, {}
    if kind == "new adapter":
        return model, {"peft_config": lora()}
    model = get_peft_model(model, lora())
    generator = torch.Generator().manual_seed(5)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # as if trained: the adapter has an effect from the first step
            param.data.normal_(std=0.1, generator=generator)
    return model, {}


def sft(engine: str, kind: str, folder: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    model, options = model_and_adapter(kind)
    return SFTTrainer(
        model=model,
        args=SFTConfig(**settings(engine, folder), max_length=16),
        train_dataset=texts(40, "text"),
        processing_class=tokenizer(),
        **options,
    )


def dpo(engine: str, kind: str, folder: Path) -> Any:
    from trl import DPOConfig, DPOTrainer

    model, options = model_and_adapter(kind)
    if kind == "whole":
        options["ref_model"] = llama()
    return DPOTrainer(
        model=model,
        args=DPOConfig(**settings(engine, folder), max_length=24, beta=0.5),
        train_dataset=texts(40, "prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
        **options,
    )


MAKERS = {"SFT": sft, "DPO": dpo}


def program(engine: str, trainer_name: str, kind: str, folder: Path) -> dict[str, Any]:
    with using(engine), accelerate_shards(engine):
        trainer = MAKERS[trainer_name](engine, kind, folder)
        trainer.train()
        assert engine == REPLICAS or len(sharded_by(trainer.model, engine)) >= 4
        if trainer_name == "DPO" and kind == "whole":
            sharded_by(trainer.ref_model, engine)
        trainer.save_model(str(folder / "model"))
        entries = [e for e in trainer.state.log_history if "loss" in e]
        assert len(entries) == STEPS
        keys = [
            k for k in ("loss", "grad_norm", "rewards/margins", "logps/chosen") if k in entries[0]
        ]
        result = {key: [entry[key] for entry in entries] for key in keys}
        return {**result, "weights": whole(trainer.model)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainer_name", list(MAKERS))
@on_ranks(2, timeout_s=300.0)
def test_train_and_save(trainer_name: str, kind: str, tmp_path: Path) -> None:
    import trl  # noqa: F401 - before install
    from safetensors.torch import load_file

    engines = (REPLICAS, *ENGINES)
    results = {e: program(e, trainer_name, kind, tmp_path / e) for e in engines}
    file = "model.safetensors" if kind == "whole" else "adapter_model.safetensors"
    for engine, result in results.items():
        result["saved"] = load_file(tmp_path / engine / "model" / file)
    ours = results["ours"]
    assert min(ours["grad_norm"]) > MAX_NORM, "nothing was clipped"
    for key in ours:
        same_numbers(ours[key], results["torch"][key], tolerance=TOLERANCE)
        same_numbers(ours[key], results[REPLICAS][key], tolerance=1e-4)
